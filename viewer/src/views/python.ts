// Colours for Python source: enough to read by, line by line, with strings over several lines followed.

export interface Token {
  text: string;
  type: "" | "keyword" | "string" | "comment" | "number" | "name";
}

const KEYWORDS = new Set(
  ("False None True and as assert async await break class continue def del elif else except finally for from global if " +
    "import in is lambda match nonlocal not or pass raise return try while with yield self cls").split(" "),
);
const PIECES = /(#.*$)|([rRbBfFuU]{0,2}(?:"""|'''))|([rRbBfFuU]{0,2}(?:"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?))|(\b\d[\w.]*)|([A-Za-z_]\w*)|(@\w[\w.]*)/g;

/** The tokens of each line of a text. */
export function tokens(lines: readonly string[]): Token[][] {
  let open = "";
  return lines.map((line) => {
    const made: Token[] = [];
    let at = 0;
    const push = (end: number, type: Token["type"]): void => {
      if (end > at) made.push({ text: line.slice(at, end), type });
      at = end;
    };
    while (at < line.length) {
      if (open) {
        const close = line.indexOf(open, at);
        push(close < 0 ? line.length : close + 3, "string");
        if (close < 0) break;
        open = "";
        continue;
      }
      PIECES.lastIndex = at;
      const found = PIECES.exec(line);
      if (!found) break;
      push(found.index, "");
      const [text, comment, triple, string, number, word, decorator] = found;
      if (triple) {
        open = triple.slice(-3);
        push(found.index + text.length, "string");
      } else if (word) {
        const before = line.slice(0, found.index);
        push(found.index + text.length, KEYWORDS.has(word) ? "keyword" : /\b(def|class)\s+$/.test(before) ? "name" : "");
      } else push(found.index + text.length, comment ? "comment" : string ? "string" : number ? "number" : decorator ? "name" : "");
    }
    push(line.length, "");
    return made;
  });
}

/** Tokens cut where a marked stretch begins and ends; the second of each pair says whether it is marked. */
export function marked(line: Token[], from: number, to: number): [Token, boolean][] {
  const made: [Token, boolean][] = [];
  let at = 0;
  for (const token of line) {
    const cuts = [from - at, to - at].filter((cut) => cut > 0 && cut < token.text.length);
    let start = 0;
    for (const cut of [...cuts, token.text.length]) {
      const place = at + start;
      made.push([{ ...token, text: token.text.slice(start, cut) }, place >= from && place < to]);
      start = cut;
    }
    at += token.text.length;
  }
  return made;
}
