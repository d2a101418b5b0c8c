// How numbers are written: the units and digits of `sightline/notation.py`.

function scaled(number: number, step: number, units: string[]): string {
  let unit = 0;
  while (Math.abs(number) >= step && unit < units.length - 1) {
    number /= step;
    unit++;
  }
  const size = Math.abs(number);
  const digits = unit === 0 || size >= 99.95 ? 0 : size < 9.995 ? 2 : 1;
  return number.toFixed(digits) + units[unit];
}

export const timeText = (ns: number): string => scaled(ns, 1000, [" ns", " µs", " ms", " s"]);
export const bytesText = (bytes: number): string => scaled(bytes, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
export const countText = (count: number): string => scaled(count, 1000, ["", "k", "M", "G", "T", "P"]);

/** A number out of a tensor, in three digits. */
export function numberText(number: number): string {
  if (Number.isNaN(number)) return "nan";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-4 || size >= 1e5)) return number.toExponential(2);
  return String(Number(number.toPrecision(3)));
}
