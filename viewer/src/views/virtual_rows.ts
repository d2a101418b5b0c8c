// Long lists: only the rows that are on the screen are in the document, however many there are.

import type { RefObject } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

const SPARE = 8; // rows that are drawn above and below the visible ones

export interface VirtualRows {
  box: RefObject<HTMLDivElement>;
  /** The rows to draw are `first … last - 1`. */
  first: number;
  last: number;
  onScroll: () => void;
  spacer: { height: number };
  /** Scrolls to a row that is not visible. */
  reveal: (row: number) => void;
}

export function useVirtualRows(count: number, height: number): VirtualRows {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const measure = (): void => {
    const element = box.current;
    if (element) setView({ top: element.scrollTop, height: element.clientHeight });
  };
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const reveal = (row: number): void => {
    const element = box.current;
    if (!element) return;
    const top = row * height;
    if (top < element.scrollTop || top + height > element.scrollTop + element.clientHeight) {
      element.scrollTop = top - element.clientHeight / 3;
    }
  };
  return {
    box,
    first: Math.min(count, Math.max(0, Math.floor(view.top / height) - SPARE)),
    last: Math.min(count, Math.ceil((view.top + view.height) / height) + SPARE),
    onScroll: measure,
    spacer: { height: count * height },
    reveal,
  };
}
