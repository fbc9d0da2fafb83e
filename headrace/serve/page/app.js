// Which view is shown, and where the keyboard goes with it.

import { startChat } from "./chat.js";
import { find } from "./dom.js";
import { watchWorld } from "./world.js";

const chosen = () => (location.hash === "#world" ? "world" : "chat");

function show() {
  const view = chosen();
  for (const name of ["chat", "world"]) {
    find(name).hidden = name !== view;
    if (name === view) find(`to-${name}`).setAttribute("aria-current", "page");
    else find(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = view === "world" ? "headrace: world" : "headrace";
  if (view === "world") watchWorld();
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  if (chosen() === "world") watchWorld();
});
startChat();
show();
