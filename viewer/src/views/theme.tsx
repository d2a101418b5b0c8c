import type { JSX } from "preact";

/** Switches between light and dark; until then it is as the system has it. */
export function ThemeButton(): JSX.Element {
  return (
    <button class="plain" type="button" onClick={switchTheme} aria-label="Switch between light and dark">
      ◐
    </button>
  );
}

function switchTheme(): void {
  const root = document.documentElement;
  const isDark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = isDark ? "light" : "dark";
  dispatchEvent(new Event("themechange"));
}
