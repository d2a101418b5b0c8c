import type { JSX } from "preact";
import { useState } from "preact/hooks";

/** Copies a text; where the browser does not let a page copy, it is selected to be copied by hand. */
export function CopyButton({ text }: { text: string }): JSX.Element {
  const [isCopied, setCopied] = useState(false);
  const copy = (): void => {
    navigator.clipboard?.writeText(text).then(
      () => {
        setCopied(true);
        setTimeout(() => setCopied(false), 1200);
      },
      () => prompt("Copy:", text),
    );
  };
  return (
    <button class="copy" type="button" title={`Copy ${text}`} aria-label={`Copy ${text}`} onClick={copy}>
      {isCopied ? "copied" : text.length > 28 ? "copy" : text}
    </button>
  );
}
