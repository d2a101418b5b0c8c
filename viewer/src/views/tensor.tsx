// A captured tensor: how its numbers are distributed, and a map of them.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type { Capture } from "../data/recording";
import { numberText } from "../text";
import { CopyButton } from "./copy";

const NAN = -1;
const POSITIVE = [217, 120, 40], NEGATIVE = [47, 115, 200], WRONG = [190, 30, 45], INFINITE = [130, 60, 170];

export function TensorPlot({ capture }: { capture: Capture }): JSX.Element {
  return (
    <section class="tensor">
      <h3>
        Captured <CopyButton text={`t.tensors[${JSON.stringify(capture.key)}]`} />
      </h3>
      {capture.bins.length > 0 && <Histogram capture={capture} />}
      {capture.cells.length > 0 && <HeatMap capture={capture} />}
      {!capture.bins.length && !capture.cells.length && <p class="dim">It has a single number: {numberText(capture.low)}</p>}
    </section>
  );
}

function Histogram({ capture }: { capture: Capture }): JSX.Element {
  const { bins, low, high } = capture;
  const most = Math.max(...bins);
  const zero = low < 0 && high > 0 ? (bins.length * -low) / (high - low) : -1;
  return (
    <figure>
      <svg class="histogram" viewBox={`0 0 ${bins.length} 40`} preserveAspectRatio="none" role="img" aria-label={`Histogram from ${numberText(low)} to ${numberText(high)}`}>
        {bins.map((count, at) => (
          <rect key={at} x={at + 0.05} y={40 - (40 * count) / most} width="0.9" height={(40 * count) / most} />
        ))}
        {zero >= 0 && <line x1={zero} x2={zero} y1="0" y2="40" />}
      </svg>
      <figcaption class="range-text">
        <span>{numberText(low)}</span>
        <span>{numberText(high)}</span>
      </figcaption>
    </figure>
  );
}

/** Cells in blue below zero and orange above it, the paler the nearer to zero; NaN in red, infinities in purple. */
function HeatMap({ capture }: { capture: Capture }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { rows, cells, least, most, slice } = capture;
  const columns = cells.length / rows;
  const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!pen) return;
    const image = pen.createImageData(columns, rows);
    cells.forEach((level, at) => {
      const number = least + ((most - least) * level) / 255;
      const color = level < 0 ? (level === NAN ? WRONG : INFINITE) : number < 0 ? NEGATIVE : POSITIVE;
      image.data.set([...color, level < 0 ? 255 : 255 * Math.min(1, Math.abs(number) / size)], at * 4);
    });
    pen.putImageData(image, 0, 0);
  }, [capture]);
  return (
    <figure>
      <canvas
        ref={canvas}
        class="heat-map"
        width={columns}
        height={rows}
        style={{ aspectRatio: `${columns} / ${Math.max(rows, columns / 8)}` }}
        role="img"
        aria-label={`Map of its numbers, from ${numberText(least)} to ${numberText(most)}`}
      />
      <figcaption class="range-text">
        <span class="below">{numberText(least)}</span>
        <span>{[slice, cells.some((level) => level < 0) ? "red: not finite" : ""].filter(Boolean).join(" ")}</span>
        <span class="above">{numberText(most)}</span>
      </figcaption>
    </figure>
  );
}
