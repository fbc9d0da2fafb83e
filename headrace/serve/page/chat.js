// The chat: turns, the stream of an answer, and what can be done with them.

import { ApiError, call, events } from "./api.js";
import { find, make } from "./dom.js";
import { Pairing, TokenTip, pieceElement } from "./tokens.js";

const TOP = 5;
const SETTINGS = "headrace-parameters";
// Of the end of the page; whoever has scrolled further up is reading there, and is left alone.
const NEAR_END = 80;

const turnsElement = find("turns");
const prompt = find("prompt");
const parameters = find("parameters");
const tip = new TokenTip(turnsElement);

// What has been said, in order; of an answer that failed, as far as it came.
const turns = [];
// Of the answer that is being made; null: none is.
let running = null;

function button(name, label, action) {
  const element = make("button", "quiet", name);
  element.type = "button";
  element.setAttribute("aria-label", label);
  element.addEventListener("click", action);
  return element;
}

// --- turns

function addTurn(role, content) {
  const element = make("article", `turn ${role}`);
  const name = role === "user" ? "You" : "Answer";
  element.setAttribute("aria-label", name);
  const text = make("div", "text", content);
  const tools = make("div", "tools");
  const turn = { role, content, element, text, tools };
  tools.append(button("Copy", `Copy: ${name}`, (event) => copy(turn, event.currentTarget)));
  if (role === "user") {
    tools.append(button("Edit", "Edit: this message, to go on from here", () => edit(turn)));
  } else {
    tools.append(button("Retry", "Retry: another answer", () => retry(turn)));
    // Its tokens are reached with the arrow keys.
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Text of the answer; arrow keys go through its tokens");
  }
  element.append(text, tools);
  turns.push(turn);
  turnsElement.append(element);
  find("welcome").hidden = true;
  return turn;
}

function dropFrom(turn) {
  for (const dropped of turns.splice(turns.indexOf(turn))) dropped.element.remove();
  find("welcome").hidden = turns.length > 0;
}

async function copy(turn, pressed) {
  let done = true;
  try {
    await navigator.clipboard.writeText(turn.content);
  } catch {
    // Pages that came over plain HTTP from another machine get no clipboard: the text is selected, for Ctrl+C.
    getSelection().selectAllChildren(turn.text);
    done = false;
  }
  pressed.textContent = done ? "Copied" : "Selected";
  say(done ? "Copied" : "The text is selected");
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

function edit(turn) {
  if (running !== null) return;
  prompt.value = turn.content;
  dropFrom(turn);
  grow();
  prompt.focus();
}

function retry(turn) {
  if (running !== null) return;
  dropFrom(turn);
  answer();
  prompt.focus();
}

const say = (text) => (find("said").textContent = text);

// --- one answer

function requestBody() {
  const fields = new FormData(parameters);
  const body = { stream: true, stream_options: { include_usage: true } };
  const system = fields.get("system").trim();
  const said = turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  body.messages = system ? [{ role: "system", content: system }, ...said] : said;
  if (fields.get("model")) body.model = fields.get("model");
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (fields.get(name) !== "") body[name] = Number(fields.get(name));
  }
  const stop = fields.get("stop").split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (fields.get("probabilities")) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  return body;
}

async function answer() {
  const body = requestBody();
  const turn = addTurn("assistant", "");
  const began = performance.now();
  const aborter = new AbortController();
  const paint = painter(turn);
  const pairing = new Pairing();
  const seen = { first: null, last: null, tokens: null, reason: null };
  setRunning(aborter);
  turn.element.setAttribute("aria-busy", "true");
  turn.element.classList.add("live");
  let error = null;
  try {
    const response = await call("v1/chat/completions", { body, signal: aborter.signal });
    let whole = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        whole = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices[0];
      if (choice === undefined) continue;
      const text = choice.delta.content ?? "";
      const tokens = choice.logprobs?.content ?? [];
      if (text || tokens.length) {
        seen.last = performance.now();
        seen.first ??= seen.last;
        turn.content += text;
        paint.add(pairing.add(tokens, text));
      }
      seen.reason = choice.finish_reason ?? seen.reason;
    }
    if (!whole) throw new ApiError("The connection to the server ended before the answer did.", 0);
  } catch (caught) {
    if (caught.name === "AbortError") seen.reason = "stopped";
    else error = caught;
  }
  paint.now();
  turn.element.removeAttribute("aria-busy");
  turn.element.classList.remove("live");
  setRunning(null);
  const stick = nearEnd();
  turn.tools.append(make("span", "facts", facts(seen, began)));
  if (stick) scroll();
  if (error === null) {
    say(seen.reason === "stopped" ? "Stopped" : "The answer is complete");
  } else {
    showError(turn, error);
  }
}

function facts({ first, last, tokens, reason }, began) {
  const parts = [];
  if (tokens !== null) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (first !== null) parts.push(`first after ${duration(first - began)}`);
  // The first token is the prompt's time, not the answer's.
  if (tokens > 1 && last > first) parts.push(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  if (reason !== null && reason !== "stop") parts.push({ length: "token limit", abort: "aborted" }[reason] ?? reason);
  return parts.join(" · ");
}

const duration = (milliseconds) => (milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(1)} s`);

function showError(turn, error) {
  const box = make("div", "error");
  box.setAttribute("role", "alert");
  const when = error.retryAfter ? ` It asks to wait ${error.retryAfter} s.` : "";
  box.append(make("p", "", (error instanceof ApiError ? error.message : `Something went wrong in this page: ${error.message}`) + when));
  box.append(button("Retry", "Retry: once more", () => retry(turn)));
  turn.element.append(box);
  turn.element.classList.toggle("empty", turn.content === "");
  scroll();
}

// What comes within one frame of the screen is painted together: a fast engine sends more often than anybody can see.
function painter(turn) {
  let pieces = [];
  let due = 0;
  const now = () => {
    cancelAnimationFrame(due);
    due = 0;
    if (!pieces.length) return;
    const stick = nearEnd();
    turn.text.append(...pieces.map(pieceElement));
    pieces = [];
    if (stick) scroll();
  };
  const add = (more) => {
    pieces.push(...more);
    if (due === 0) due = requestAnimationFrame(now);
  };
  return { add, now };
}

const nearEnd = () => turnsElement.scrollHeight - turnsElement.scrollTop - turnsElement.clientHeight < NEAR_END;
const scroll = () => (turnsElement.scrollTop = turnsElement.scrollHeight);

function setRunning(aborter) {
  running = aborter;
  const focused = document.activeElement;
  find("send").hidden = aborter !== null;
  find("stop").hidden = aborter === null;
  turnsElement.classList.toggle("busy", aborter !== null);
  // The button that was pressed has gone: the focus must not fall out of the form with it.
  if (focused === find("send") || focused === find("stop")) (aborter === null ? prompt : find("stop")).focus();
}

const stop = () => running?.abort();

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight / 3)}px`;
}

function submit(event) {
  event?.preventDefault();
  const content = prompt.value.trim();
  if (running !== null || content === "") return;
  if (!parameters.checkValidity()) {
    find("settings").open = true;
    parameters.reportValidity();
    return;
  }
  prompt.value = "";
  grow();
  addTurn("user", content);
  scroll();
  answer();
}

// --- parameters

function restore() {
  let kept;
  try {
    kept = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  } catch {
    kept = {};
  }
  for (const [name, value] of Object.entries(kept)) {
    const field = parameters.elements[name];
    if (field === undefined) continue;
    if (field.type === "checkbox") field.checked = value === "on";
    else field.value = value;
  }
}

function keep() {
  // Not the model, which another server at this address does not have. A box that is not ticked is not in the form's data.
  const { model, ...kept } = { probabilities: "", ...Object.fromEntries(new FormData(parameters)) };
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(kept));
  } catch {
    // Where storage is refused they last as long as the page.
  }
}

async function loadModels() {
  const select = parameters.elements.model;
  const loading = find("loading");
  // While the model loads, the server says how far it is and when to ask again.
  try {
    const models = (await (await call("v1/models")).json()).data;
    loading.hidden = true;
    select.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    find("model-name").textContent = models[0]?.id ?? "the model";
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.retryAfter !== null) {
      loading.hidden = false;
      if (loading.textContent !== error.message) loading.textContent = error.message;
      setTimeout(loadModels, 1000 * error.retryAfter);
      return;
    }
    // The chat works without: no model named is the server's own. What is wrong is said when something is asked of it.
    select.replaceChildren(new Option("that of the server", ""));
  }
  restore();
}

/** Called once. */
export function startChat() {
  find("composer").addEventListener("submit", submit);
  find("stop").addEventListener("click", stop);
  find("clear").addEventListener("click", () => {
    stop();
    if (turns.length) dropFrom(turns[0]);
    prompt.focus();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    // While an input method is composing, Enter is a choice of its own.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || find("key-dialog").open) return;
    if (tip.open) tip.hide();
    else stop();
  });
  parameters.addEventListener("change", keep);
  parameters.addEventListener("submit", (event) => event.preventDefault());
  // Fields are reset after this event.
  parameters.addEventListener("reset", () => setTimeout(keep));
  find("settings").open = matchMedia("(min-width: 60rem)").matches;
  restore();
  loadModels();
}
