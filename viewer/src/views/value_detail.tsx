// All facts about a value: its shape, statistics and drawing, its producer, its consumers, and its history.

import type { JSX } from "preact";
import { lineageOf } from "../data/lineage";
import type { Statistics } from "../data/recording";
import type { State } from "../state";
import { bytesText, numberText } from "../text";
import { CopyButton } from "./copy";
import { Name } from "./name";
import { TensorPlot } from "./tensor";

const MOST_LINKS = 8; // readers of a value that are named
const MOST_BEHIND = 12; // ops behind a value that are listed

interface ValuesProps {
  state: State;
  title: string;
  values: number[];
  names: string[];
}

export function Values({ state, title, values, names }: ValuesProps): JSX.Element | null {
  if (!values.length) return null;
  return (
    <section>
      <h3>{title}</h3>
      <ul class="values">
        {values.map((value, at) => (
          <ValueRow key={at} state={state} value={value} name={names[at] ?? ""} makes={title === "Outputs"} />
        ))}
      </ul>
    </section>
  );
}

interface ValueRowProps {
  state: State;
  value: number;
  name: string;
  makes: boolean;
}

function ValueRow({ state, value, name, makes }: ValueRowProps): JSX.Element {
  const { recording } = state;
  const kind = recording.run.kinds[recording.valueKind[value]];
  const maker = recording.valueProducer[value];
  const label = recording.valueLabel(value);
  const statistics = recording.statistics(value);
  const capture = recording.capture(value);
  const wrong = statistics && statistics.nans + statistics.infs > 0;
  return (
    <li class={state.value.value === value ? "value selected" : "value"}>
      <button class="value-head" type="button" onClick={() => (state.value.value = value)}>
        {name && <span class="argument">{name}</span>}
        <span class="shape">{recording.shape(value)}</span>
        {label && <span class="label"><Name text={label} /></span>}
        {wrong && <span class="badge error">not finite</span>}
        <span class="dim id">${recording.valueNumber(value)}</span>
      </button>
      {statistics && <Range statistics={statistics} />}
      {capture && <TensorPlot capture={capture} />}
      <div class="flow">
        {makes ? (
          <Readers state={state} value={value} />
        ) : maker >= 0 ? (
          <>
            made by <OpButton state={state} op={maker} value={value} />
          </>
        ) : (
          <span class="dim">{kind}</span>
        )}
      </div>
    </li>
  );
}

function Readers({ state, value }: { state: State; value: number }): JSX.Element {
  const { recording } = state;
  const readers = recording.consumers(value).filter((op) => recording.opParent[op] < 0 || recording.opPhase[op] === 1);
  if (!readers.length) return <span class="dim">nobody reads it</span>;
  return (
    <>
      read by{" "}
      {readers.slice(0, MOST_LINKS).map((op, at) => (
        <span key={op}>
          {at > 0 && ", "}
          <OpButton state={state} op={op} value={-1} />
        </span>
      ))}
      {readers.length > MOST_LINKS && <span class="dim"> and {readers.length - MOST_LINKS} more</span>}
    </>
  );
}

export function OpButton({ state, op, value }: { state: State; op: number; value: number }): JSX.Element {
  return (
    <button class="link op" type="button" onClick={() => state.selectOp(op, value)}>
      {state.recording.opLabel(op)}
    </button>
  );
}

export function OpLink({ state, term, op }: { state: State; term: string; op: number }): JSX.Element {
  return (
    <div>
      <dt>{term}</dt>
      <dd>
        <OpButton state={state} op={op} value={-1} />{" "}
        <span class="dim">
          <Name text={state.recording.position(state.recording.opLine[op])} />
        </span>
      </dd>
    </div>
  );
}

/** Minimum, mean, deviation and maximum on a line: where most of the numbers are. */
function Range({ statistics }: { statistics: Statistics }): JSX.Element {
  const { min, max, mean, std, nans, infs, zeros } = statistics;
  const width = max - min;
  const place = (number: number): number => Math.max(0, Math.min(100, (100 * (number - min)) / width));
  const from = place(mean - std);
  return (
    <div class="statistics">
      {width > 0 && Number.isFinite(width) && (
        <div class="range" role="img" aria-label={`from ${numberText(min)} to ${numberText(max)}, mean ${numberText(mean)}`}>
          <i class="spread" style={{ left: `${from}%`, width: `${place(mean + std) - from}%` }} />
          <i class="mean" style={{ left: `${place(mean)}%` }} />
        </div>
      )}
      <div class="range-text">
        <span>{numberText(min)}</span>
        <span>
          mean {numberText(mean)} ± {numberText(std)}
        </span>
        <span>{numberText(max)}</span>
      </div>
      {(nans > 0 || infs > 0) && (
        <div class="wrong">
          {nans > 0 && `${nans.toLocaleString("en")} NaN `}
          {infs > 0 && `${infs.toLocaleString("en")} Inf`}
        </div>
      )}
      {zeros > 0 && <div class="dim">{zeros.toLocaleString("en")} zeros</div>}
    </div>
  );
}

export function ValueDetail({ state, value }: { state: State; value: number }): JSX.Element {
  const { recording } = state;
  const maker = recording.valueProducer[value];
  const base = recording.valueBase[value];
  const number = recording.valueNumber(value);
  return (
    <section class="value-detail">
      <h3>
        Value ${number} <CopyButton text={`t.values[${number}]`} /> <CopyButton text={recording.shape(value)} />
      </h3>
      <dl class="links">
        <div>
          <dt>is</dt>
          <dd>
            <span class="shape">{recording.shape(value)}</span> {recording.run.kinds[recording.valueKind[value]]}{" "}
            {recording.valueLabel(value)}, storage {bytesText(recording.valueBytes[value])}
          </dd>
        </div>
        {maker >= 0 && <OpLink state={state} term="made by" op={maker} />}
        {base >= 0 && (
          <div>
            <dt>view of</dt>
            <dd>
              <button class="link" type="button" onClick={() => state.selectValue(base)}>
                ${recording.valueNumber(base)} {recording.shape(base)}
              </button>
            </dd>
          </div>
        )}
        <div>
          <dt>goes to</dt>
          <dd>
            <Readers state={state} value={value} />
          </dd>
        </div>
      </dl>
    </section>
  );
}

/** The history of a value: the ops behind it, the latest first, and the values from outside. */
export function LineageList({ state, value }: { state: State; value: number }): JSX.Element | null {
  const { recording } = state;
  if (value < 0 || recording.valueProducer[value] < 0) return null;
  const { steps, more, isCut, sources } = lineageOf(recording, value, MOST_BEHIND);
  const named = sources.filter((each) => recording.valueLabel(each));
  return (
    <section class="lineage">
      <h3>
        Lineage of ${recording.valueNumber(value)} <CopyButton text={`t.lineage("$${recording.valueNumber(value)}")`} />
      </h3>
      <ol>
        {steps.map(({ op, value: made }) => (
          <li key={op}>
            <OpButton state={state} op={op} value={made} /> <span class="shape">{recording.shape(made)}</span>{" "}
            <span class="dim">{recording.position(recording.opLine[op]).replace(/^.*\//, "")}</span>
          </li>
        ))}
      </ol>
      {more > 0 && <p class="dim">{`and ${more.toLocaleString("en")}${isCut ? " or more" : ""} ops before these`}</p>}
      {named.length > 0 && (
        <p class="dim">
          out of{" "}
          {named.slice(0, MOST_LINKS).map((each, at) => (
            <span key={each}>
              {at > 0 && ", "}
              <button class="link" type="button" onClick={() => state.selectValue(each)}>
                {recording.valueLabel(each)}
              </button>
            </span>
          ))}
          {named.length > MOST_LINKS && ` and ${named.length - MOST_LINKS} more`}
        </p>
      )}
    </section>
  );
}
