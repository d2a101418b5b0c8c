import { render } from "preact";
import { effect } from "@preact/signals";
import { Recording } from "./data/recording";
import { decoded, Sections } from "./data/sections";
import { State } from "./state";
import { Page } from "./views/page";
import "./style.css";

async function start(): Promise<void> {
  const root = document.getElementById("page");
  const data = document.getElementById("recording");
  if (!root || !data) return;
  root.textContent = "";
  try {
    const recording = new Recording(await Sections.read(decoded(data.textContent ?? "")));
    data.remove(); // what it held is in columns now
    const state = new State(recording);
    state.follow(location.hash);
    followAddress(state);
    render(<Page state={state} />, root);
    root.dataset.ready = "true";
  } catch (error) {
    root.textContent = `This page could not be read: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** The selection is in the address, so that a link leads to it; steps back and forward select. */
function followAddress(state: State): void {
  addEventListener("hashchange", () => state.follow(location.hash));
  effect(() => {
    void state.row.value;
    void state.value.value;
    const { fragment } = state;
    if (fragment && `#${fragment}` !== location.hash) history.replaceState(null, "", `#${fragment}`);
  });
}

void start();
