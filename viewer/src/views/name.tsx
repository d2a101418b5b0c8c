// A long name, which may be broken after its dots and nowhere else if that is enough.

import type { JSX } from "preact";

export function Name({ text }: { text: string }): JSX.Element {
  return (
    <>
      {text.split(/(?<=[._/])/).map((part, at) => (
        <span key={at}>
          {at > 0 && <wbr />}
          {part}
        </span>
      ))}
    </>
  );
}
