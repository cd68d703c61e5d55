// A classic script in <head>, so that the right theme is there before the first paint.
(() => {
  const KEY = "airmoe-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage can be forbidden; the system's choice will do
    }
  }

  function apply() {
    const theme = remembered() ?? (system.matches ? "dark" : "light");
    root.dataset.theme = theme;
    // Charts paint on canvas and cannot follow CSS variables by themselves.
    dispatchEvent(new CustomEvent("themechange", { detail: theme }));
  }

  function toggle() {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // not remembered, still applied below
    }
    root.dataset.theme = next;
    dispatchEvent(new CustomEvent("themechange", { detail: next }));
    label();
  }

  function label() {
    const button = document.getElementById("theme-toggle");
    const other = root.dataset.theme === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `Switch to ${other} theme`);
    button.title = `Switch to ${other} theme`;
  }

  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    label();
    addEventListener("themechange", label);
    document.getElementById("theme-toggle").addEventListener("click", toggle);
  });
})();
