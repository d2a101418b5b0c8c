// Reads what `sightline/page/sections.py` packs: named columns and plain tables, each compressed by itself.

export const FORMAT = 1;

export type Numbers = Int8Array | Int16Array | Int32Array | Float32Array | Float64Array;

interface Entry {
  name: string;
  type: "i1" | "i2" | "i4" | "f4" | "f8" | "json";
  length: number;
  size: number;
  grows?: boolean;
}

const WIDTH = { i1: 1, i2: 2, i4: 4, f4: 4, f8: 8 } as const;

export class Sections {
  private constructor(
    private readonly columns: Map<string, Numbers>,
    private readonly tables: Map<string, unknown>,
  ) {}

  /** Decompresses all sections; they do not wait for each other. */
  static async read(block: Uint8Array): Promise<Sections> {
    const view = new DataView(block.buffer, block.byteOffset, block.byteLength);
    const headerSize = view.getUint32(0, true);
    const header = JSON.parse(text(block.subarray(4, 4 + headerSize))) as { format: number; sections: Entry[] };
    if (header.format !== FORMAT) {
      throw new Error(`This page holds data of format ${header.format}, and its viewer reads format ${FORMAT}.`);
    }
    const columns = new Map<string, Numbers>();
    const tables = new Map<string, unknown>();
    let at = 4 + headerSize;
    await Promise.all(
      header.sections.map(async (entry) => {
        const packed = block.subarray(at, at + entry.size);
        at += entry.size;
        const bytes = await inflated(packed);
        if (entry.type === "json") tables.set(entry.name, JSON.parse(text(bytes)));
        else columns.set(entry.name, column(bytes, entry));
      }),
    );
    return new Sections(columns, tables);
  }

  column(name: string): Numbers {
    const found = this.columns.get(name);
    if (!found) throw new Error(`This page has no column ${name}.`);
    return found;
  }

  table<T>(name: string): T {
    if (!this.tables.has(name)) throw new Error(`This page has no table ${name}.`);
    return this.tables.get(name) as T;
  }
}

/** The bytes of a text in base64, as they stand in the page. */
export function decoded(base64: string): Uint8Array {
  const binary = atob(base64.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

function text(bytes: Uint8Array): string {
  return new TextDecoder().decode(bytes);
}

async function inflated(packed: Uint8Array): Promise<Uint8Array> {
  const stream = new Blob([packed as BlobPart]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** A column out of its planes of bytes; one that grows is added up, in doubles, which hold every sum exactly. */
function column(bytes: Uint8Array, entry: Entry): Numbers {
  const { length } = entry;
  const type = entry.type as keyof typeof WIDTH;
  const width = WIDTH[type];
  const whole = new Uint8Array(length * width);
  for (let plane = 0; plane < width; plane++) {
    const from = plane * length;
    for (let i = 0; i < length; i++) whole[i * width + plane] = bytes[from + i];
  }
  const numbers = typed(type, whole.buffer);
  if (!entry.grows) return numbers;
  const sums = new Float64Array(length);
  let sum = 0;
  for (let i = 0; i < length; i++) {
    sum += numbers[i];
    sums[i] = sum;
  }
  return sums;
}

function typed(type: keyof typeof WIDTH, buffer: ArrayBuffer): Numbers {
  switch (type) {
    case "i1":
      return new Int8Array(buffer);
    case "i2":
      return new Int16Array(buffer);
    case "i4":
      return new Int32Array(buffer);
    case "f4":
      return new Float32Array(buffer);
    case "f8":
      return new Float64Array(buffer);
  }
}
