// Problems, the most serious first; each leads to its op and its line.

import type { ComponentChildren, JSX } from "preact";
import type { Problem, ProblemText } from "../data/recording";
import type { State } from "../state";

export function Problems({ state }: { state: State }): JSX.Element {
  const { found, notLookedAt } = state.recording.problems;
  return (
    <div class="problems">
      {found.length === 0 && <p class="empty">Nothing looks wrong in this run.</p>}
      <ol>
        {found.map((problem, at) => (
          <ProblemRow key={at} state={state} problem={problem} />
        ))}
      </ol>
      {notLookedAt.length > 0 && (
        <section class="aside">
          <h2>What this recording cannot tell</h2>
          <ul>
            {notLookedAt.map((text) => (
              <li key={text}>{text}</li>
            ))}
          </ul>
        </section>
      )}
    </div>
  );
}

function ProblemRow({ state, problem }: { state: State; problem: Problem }): JSX.Element {
  const leads = problem.op >= 0 || problem.value >= 0;
  const go = (): void => {
    if (problem.op >= 0) state.selectOp(problem.op);
    else if (problem.value >= 0) state.selectValue(problem.value);
  };
  return (
    <li>
      <ProblemCard
        problem={problem}
        actions={
          leads && (
            <span class="go">
              <button type="button" onClick={go}>
                Select
              </button>
              <button
                type="button"
                onClick={() => {
                  go();
                  state.tab.value = "source";
                }}
              >
                Show the line
              </button>
            </span>
          )
        }
      />
    </li>
  );
}

interface CardProps {
  problem: ProblemText;
  /** Buttons beside the place. */
  actions?: ComponentChildren;
  children?: ComponentChildren;
}

/** A problem: its title, place and reason. */
export function ProblemCard({ problem, actions, children }: CardProps): JSX.Element {
  return (
    <article class={`problem ${problem.severity}`}>
      <div class="head">
        <span class={`badge ${problem.severity}`}>{problem.severity}</span>
        <span class="slug">{problem.kind}</span>
        {problem.times && <span class="times">{problem.times}</span>}
      </div>
      <p class="title">{problem.title}</p>
      {problem.detail && <pre class="detail-text">{problem.detail}</pre>}
      <p class="why">{problem.why}</p>
      <div class="where">
        {problem.module && <span class="module">{problem.module}</span>}
        {problem.place && <code>{problem.place}</code>}
        {problem.called && problem.called !== problem.place && <span>called at <code>{problem.called}</code></span>}
        {actions}
      </div>
      {children}
    </article>
  );
}
