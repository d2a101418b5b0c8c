// The meaning of the keys, in a dialog that `?` opens.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";

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
