// Tokens of an answer: which text each of them made, how likely it was, and what else could have stood there.

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const LONGEST = 4; // of the tokens of one character: its bytes
// Of each piece of text in the page, its tokens.
const tokensOf = new WeakMap();

/** Pairs tokens, as the API has them in `logprobs.content`, with the text that they made. */
export class Pairing {
  // Tokens whose text has not come yet: half a character, or the beginning of what may be a stop string.
  #waiting = [];
  #begun = false;

  /** Pieces `{text, tokens}` of what is new; joined, their texts are `text`. A character may take several tokens, and some have no text. */
  add(tokens, text) {
    const pieces = [];
    let rest = text;
    let group = [];
    for (const token of [...this.#waiting, ...tokens]) {
      group.push(token);
      const made = this.#made(group, rest);
      if (made !== "") {
        this.#begun = true;
        pieces.push({ text: made, tokens: group });
        rest = rest.slice(made.length);
        group = [];
      }
    }
    // Tokens and text that do not fit, as where the text was trimmed, stay together as one piece.
    if (rest) pieces.push({ text: rest, tokens: group });
    this.#waiting = rest ? [] : group;
    return pieces;
  }

  // What the last of these tokens made of the beginning of `rest`; those before them may have no text, as the marks of a template have none.
  #made(group, rest) {
    for (let count = 1; count <= Math.min(group.length, LONGEST); count++) {
      const made = decoded(group.slice(-count));
      if (made && rest.startsWith(made)) return made;
      // Some tokenizers begin with a blank that is no part of the text.
      if (made && !this.#begun && rest.startsWith(made.trimStart())) return made.trimStart();
    }
    return "";
  }
}

function decoded(tokens) {
  const bytes = tokens.flatMap((token) => token.bytes ?? [...new TextEncoder().encode(token.token)]);
  try {
    return strict.decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

/** A piece of text as an element, tinted by the least likely of its tokens. */
export function pieceElement({ text, tokens }) {
  const span = document.createElement("span");
  span.textContent = text;
  if (tokens.length) {
    const least = Math.exp(Math.min(...tokens.map((token) => token.logprob)));
    span.className = `token p${[0.05, 0.25].filter((bound) => least >= bound).length}`;
    tokensOf.set(span, tokens);
  }
  return span;
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : share > 0 ? "< 0.1 %" : "0 %";
};

/** The one tooltip of the page, for whatever piece is pointed at or reached with the arrow keys. */
export class TokenTip {
  #tip = document.getElementById("tip");
  #shown = null;

  /** Follow the pointer and the keys within `log`. */
  constructor(log) {
    log.addEventListener("pointerover", (event) => this.#pointed(event.target));
    log.addEventListener("pointerleave", () => this.hide());
    log.addEventListener("keydown", (event) => this.#key(event));
    log.addEventListener("focusout", () => this.hide());
    document.addEventListener("scroll", () => this.hide(), { passive: true, capture: true });
  }

  get open() { return this.#shown !== null; }

  hide() {
    this.#shown?.classList.remove("at");
    this.#shown = null;
    this.#tip.hidden = true;
  }

  #pointed(element) {
    if (tokensOf.has(element)) this.#show(element);
    else this.hide();
  }

  // The text of an answer takes the focus as a whole: a stop at each of its hundred tokens would be no help with the tab key.
  #key(event) {
    const text = event.target.closest(".text");
    if (text === null || text !== event.target) return;
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    const pieces = [...text.querySelectorAll(".token")];
    if (!pieces.length) return;
    event.preventDefault();
    const at = pieces.indexOf(this.#shown);
    const next = at < 0 && event.key === "ArrowLeft" ? pieces.length - 1 : Math.min(pieces.length - 1, Math.max(0, at + moves[event.key]));
    pieces[next].scrollIntoView({ block: "nearest" });
    this.#show(pieces[next]);
    document.getElementById("said").textContent = spoken(tokensOf.get(pieces[next]));
  }

  #show(piece) {
    this.hide();
    this.#shown = piece;
    piece.classList.add("at");
    this.#tip.replaceChildren(...tokensOf.get(piece).map(tokenTable));
    this.#tip.hidden = false;
    const place = piece.getClientRects()[0] ?? piece.getBoundingClientRect();
    const { width, height } = this.#tip.getBoundingClientRect();
    const above = place.top - height - 6;
    this.#tip.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, place.left))}px`;
    this.#tip.style.top = `${above >= 8 ? above : place.bottom + 6}px`;
  }
}

function spoken([token]) {
  const others = token.top_logprobs.filter((other) => other.token !== token.token);
  const or = others.length ? `; or ${others.map((other) => `${visible(other.token)} ${percent(other.logprob)}`).join(", ")}` : "";
  return `${visible(token.token)} ${percent(token.logprob)}${or}`;
}

function tokenTable(token) {
  const table = document.createElement("table");
  const own = token.top_logprobs.find((other) => other.token === token.token);
  const rows = own ? token.top_logprobs : [...token.top_logprobs, token];
  for (const row of rows) {
    const tr = table.insertRow();
    tr.className = row.token === token.token ? "own" : "";
    tr.insertCell().textContent = visible(row.token);
    tr.insertCell().textContent = percent(row.logprob);
    const bar = document.createElement("i");
    bar.style.width = `${100 * Math.exp(row.logprob)}%`;
    tr.insertCell().append(bar);
  }
  return table;
}
