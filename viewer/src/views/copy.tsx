import type { JSX } from "preact";
import { useState } from "preact/hooks";

/** Copies a text; where the browser has no clipboard for a page, as in a frame, through a selection. */
export function CopyButton({ text }: { text: string }): JSX.Element {
  const [isCopied, setCopied] = useState(false);
  const copy = async (): Promise<void> => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      if (!copySelected(text)) return;
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 1200);
  };
  return (
    <button class="copy" type="button" title={`Copy ${text}`} aria-label={`Copy ${text}`} onClick={() => void copy()}>
      {isCopied ? "copied" : text.length > 28 ? "copy" : text}
    </button>
  );
}

function copySelected(text: string): boolean {
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}
