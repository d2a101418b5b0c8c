// The page: the tree at the left, problems, graph and source in the middle, the detail at the right, time below.

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import type { State } from "../state";
import { bytesText, countText, timeText } from "../text";
import { CostView } from "./cost";
import { Detail } from "./detail";
import { GraphView } from "./graph";
import { KeysButton, shortcut, TABS } from "./keys";
import { Problems } from "./problems";
import { SourceView } from "./source";
import { ThemeButton } from "./theme";
import { TimelineView } from "./timeline";
import { timelineHeight } from "./timeline_drawing";
import { Tree } from "./tree";

/** The page of a run; `before` stands in front of the text of its header. */
export function Page({ state, before }: { state: State; before?: JSX.Element }): JSX.Element {
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => shortcut(state, event);
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [state]);
  return (
    <div class="page" style={{ "--time": `${timelineHeight(state.recording)}px` }}>
      <Header state={state} before={before} />
      <Tree state={state} />
      <Middle state={state} />
      <Detail state={state} />
      <TimelineView state={state} />
    </div>
  );
}

function Middle({ state }: { state: State }): JSX.Element {
  const tab = state.tab.value;
  const wrong = state.recording.problems.found;
  return (
    <main class="middle">
      <div class="tabs" role="tablist" aria-label="Views">
        {TABS.map(([name, title]) => (
          <button
            key={name}
            id={`tab-${name}`}
            role="tab"
            type="button"
            aria-selected={tab === name}
            aria-controls="tab-panel"
            onClick={() => (state.tab.value = name)}
          >
            {title}
            {name === "problems" && wrong.length > 0 && <span class={`badge ${wrong[0].severity}`}>{wrong.length}</span>}
          </button>
        ))}
      </div>
      <div class="panel" id="tab-panel" role="tabpanel" aria-labelledby={`tab-${tab}`}>
        {tab === "problems" && <Problems state={state} />}
        {tab === "graph" && <GraphView state={state} />}
        {tab === "source" && <SourceView state={state} />}
        {tab === "cost" && <CostView state={state} />}
      </div>
    </main>
  );
}

function Header({ state, before }: { state: State; before?: JSX.Element | undefined }): JSX.Element {
  const { run, timeline } = state.recording;
  const facts: [string, string][] = [
    [run.recordedOps.toLocaleString("en"), run.recordedOps === 1 ? "op" : "ops"],
    [timeText(run.duration), "recorded"],
    ...(run.parameters ? [[countText(run.parameters), "parameters"] as [string, string]] : []),
    ...(timeline.memory ? [[bytesText(timeline.memory.peak), "peak memory"] as [string, string]] : []),
    ...(timeline.steps.length > 1 ? [[String(timeline.steps.length), "steps"] as [string, string]] : []),
  ];
  return (
    <header class="header">
      <h1>
        <button class="plain" type="button" title="Everything: select nothing" onClick={() => state.deselect()}>
          {run.name || "a run"}
        </button>
      </h1>
      {before}
      {state.recording.isFolded && (
        <span class="badge note" title={`It holds ${run.ops.toLocaleString("en")} of them: of equal layers and steps the first`}>
          folded
        </span>
      )}
      {run.unfinished && <span class="badge warning">cut short</span>}
      <dl class="facts">
        {facts.map(([number, name]) => (
          <div key={name}>
            <dd>{number}</dd>
            <dt>{name}</dt>
          </div>
        ))}
      </dl>
      <KeysButton />
      <ThemeButton />
    </header>
  );
}
