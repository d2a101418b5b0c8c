// The keys: which does what, and the dialog about them that `?` opens.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import type { State, Tab } from "../state";

/** The tabs in the middle, in the order of their keys. */
export const TABS: [Tab, string][] = [
  ["problems", "Problems"],
  ["graph", "Graph"],
  ["source", "Source"],
  ["cost", "Cost"],
];

const KEYS: [string[], string][] = [
  [["/"], "search; enter selects what is found"],
  [["↑", "↓", "←", "→"], "walk the tree, open and close its rows"],
  [["1", "2", "3", "4"], "problems, graph, source, cost"],
  [["tab"], "to the next part of the page, and through the nodes of the graph"],
  [["enter", "space"], "in the graph: select a node, expand it"],
  [["←", "→"], "on the timeline: from op to op; with shift a stretch of time"],
  [["w", "s", "a", "d"], "on the timeline: zoom in and out, move"],
  [["z", "0"], "show on the timeline what is selected, show everything"],
  [["esc"], "select nothing"],
];

export function KeysButton(): JSX.Element {
  const dialog = useRef<HTMLDialogElement>(null);
  return (
    <>
      <button id="keys" class="plain" type="button" aria-label="What the keys do" title="What the keys do (?)" onClick={() => dialog.current?.showModal()}>
        ?
      </button>
      <dialog ref={dialog} class="keys" aria-label="What the keys do" onClick={(event) => event.target === dialog.current && dialog.current?.close()}>
        <table>
          <tbody>
            {KEYS.map(([keys, text]) => (
              <tr key={text}>
                <th scope="row">
                  {keys.map((key) => (
                    <kbd key={key}>{key}</kbd>
                  ))}
                </th>
                <td>{text}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <form method="dialog">
          <button type="submit">Close</button>
        </form>
      </dialog>
    </>
  );
}

/** Do what a key does wherever the focus is; the tree, the graph and the timeline have keys of their own. */
export function shortcut(state: State, event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (isTyping) {
    if (event.key === "Escape") focusTree();
    return;
  }
  const tab = TABS[Number(event.key) - 1];
  if (tab) state.tab.value = tab[0];
  else if (event.key === "Escape") state.deselect();
  else if (event.key === "z" && state.selectedSpan) state.zoom(state.selectedSpan);
  else if (event.key === "0") state.zoom();
  else if (event.key === "?") document.getElementById("keys")?.click();
  else if (event.key === "/") {
    document.getElementById("search")?.focus();
    event.preventDefault();
  }
}

export function focusTree(): void {
  document.getElementById("tree")?.focus();
}
