// Not a module, and in the head: the page is never painted in another theme than the one that was chosen.
(() => {
  const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
  const root = document.documentElement;
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("headrace-theme") ?? chosen;
  } catch {
    // Storage is refused where cookies are: then a choice lasts as long as the page.
  }
  if (!(chosen in THEMES)) chosen = "auto";
  function apply(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }
  apply(chosen);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = THEMES[chosen];
      button.setAttribute("aria-label", `Theme: ${THEMES[chosen].toLowerCase()}`);
    };
    button.addEventListener("click", () => {
      const names = Object.keys(THEMES);
      chosen = names[(names.indexOf(chosen) + 1) % names.length];
      try {
        localStorage.setItem("headrace-theme", chosen);
      } catch {
        // See above.
      }
      apply(chosen);
      show();
    });
    show();
  });
})();
