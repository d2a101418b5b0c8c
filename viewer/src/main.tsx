import { render } from "preact";
import { effect } from "@preact/signals";
import { Comparison } from "./data/comparison";
import { Job } from "./data/job";
import { Recording } from "./data/recording";
import { decoded, Sections } from "./data/sections";
import { State } from "./state";
import { DiffPage, DiffState } from "./views/diff";
import { JobPage, JobState } from "./views/job";
import { Page } from "./views/page";
import "./style.css";

async function start(): Promise<void> {
  const root = document.getElementById("page");
  if (!root) return;
  root.textContent = "";
  try {
    if (document.getElementById("comparison")) {
      const [a, b, comparison] = await Promise.all(["recording-a", "recording-b", "comparison"].map(read));
      const state = new DiffState(new Comparison(comparison, new Recording(a), new Recording(b)));
      followAddress(state);
      render(<DiffPage state={state} />, root);
    } else if (document.getElementById("ranks")) {
      const state = new JobState(new Job(await read("ranks")), read);
      followAddress(state);
      render(<JobPage state={state} />, root);
    } else {
      const state = new State(new Recording(await read("recording")));
      followAddress(state);
      render(<Page state={state} />, root);
    }
    root.dataset.ready = "true";
  } catch (error) {
    root.textContent = `This page could not be read: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** The content of an element of the page, which is then removed: its data are in columns. */
async function read(id: string): Promise<Sections> {
  const element = document.getElementById(id);
  const sections = await Sections.read(decoded(element?.textContent ?? ""));
  element?.remove();
  return sections;
}

/** The selection is in the address, so that a link leads to it; steps back and forward select. */
function followAddress(state: State | DiffState | JobState): void {
  if (location.protocol === "about:") return; // a frame in a notebook has no address of its own
  state.follow(location.hash);
  addEventListener("hashchange", () => state.follow(location.hash));
  effect(() => {
    const { fragment } = state; // reads the selection
    if (fragment ? `#${fragment}` !== location.hash : location.hash) history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname);
  });
}

void start();
