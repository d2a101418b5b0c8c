import { defineConfig } from "vitest/config";

// One script and one style sheet, which the Python package puts into every page it writes.
export default defineConfig({
  build: {
    outDir: "../src/sightline/page",
    emptyOutDir: false,
    target: "es2022",
    cssCodeSplit: false,
    reportCompressedSize: false,
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "sightline", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
  define: { "process.env.NODE_ENV": JSON.stringify("production") },
  test: { environment: "node", include: ["tests/**/*.test.ts"] },
});
