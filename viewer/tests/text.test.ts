import { expect, it } from "vitest";
import { bytesText, countText, numberText, timeText } from "../src/text";
import { marked, tokens } from "../src/views/python";

it("writes numbers as the package does", () => {
  expect([timeText(850), timeText(12_300), timeText(4_560_000)]).toEqual(["850 ns", "12.3 µs", "4.56 ms"]);
  expect([bytesText(512), bytesText(1536)]).toEqual(["512 B", "1.50 KiB"]);
  expect([countText(950), countText(1234), countText(5_600_000_000)]).toEqual(["950", "1.23k", "5.60G"]);
  expect([-3.14159, 0, 123456, NaN, -Infinity, 0.00001].map(numberText)).toEqual(["-3.14", "0", "1.23e+5", "nan", "-inf", "1.00e-5"]);
});

it("colours Python, and follows a string over lines", () => {
  const [first, second, third] = tokens(['def f(x): # "no"', '    """doc', 'end""" + 1']);
  expect(first.map(({ text, type }) => [text, type]).filter(([, type]) => type)).toEqual([
    ["def", "keyword"],
    ["f", "name"],
    ['# "no"', "comment"],
  ]);
  expect(second.at(-1)).toEqual({ text: "doc", type: "string" });
  expect(third[0]).toEqual({ text: 'end"""', type: "string" });
  expect(third.at(-1)?.type).toBe("number");
});

it("marks a stretch of a line and loses nothing", () => {
  const [line] = tokens(["y = self.fc(x)"]);
  const parts = marked(line, 4, 14);
  expect(parts.map(([token]) => token.text).join("")).toBe("y = self.fc(x)");
  expect(parts.filter(([, isMarked]) => isMarked).map(([token]) => token.text).join("")).toBe("self.fc(x)");
});
