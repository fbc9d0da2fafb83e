// The live page of the world: asks for what is new once a second, while somebody can see it.

import { ApiError, call } from "./api.js";
import { find, make } from "./dom.js";
import { Plot, SPAN } from "./plot.js";

const EVERY = 1000;
const PATIENCE = 5000;
const MOST_LOGGED = 200;

const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const small = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const number = (value) => (value < 100 ? small : count).format(value);
const milliseconds = (value) => (value >= 1000 ? `${small.format(value / 1000)} s` : `${small.format(value)} ms`);

let plots = [];
// Of each source, which is one frontend since its start, its log and the number of its last point. Several may share the port, and any
// answers: their points of the world are joined, and so a history goes on when the connection is another one.
const sources = new Map();
let latest = null;
let points = [];
let timer = 0;
let asking = false, refused = false;

const STATES = {
  starting: ["Starting", "wait"], ready: ["Ready", "good"], paused: ["Paused", "wait"],
  restarting: ["Died, restarts", "bad"], backing_off: ["About to restart", "wait"], reviving: ["Starting again", "wait"],
  draining: ["Draining", "wait"], leaving: ["Ending", "wait"],
  dead: ["Dead", "bad"], reaped: ["Dead", "bad"], closed: ["Closed", "bad"],
};
const RANKS = { awaited: "wait", started: "wait", loading: "wait", ready: "good", dead: "bad", gone: "off" };

// Only what differs is written: a screen reader would read everything again, and a selection would be lost.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fill(list, rows) {
  const shown = JSON.stringify(rows);
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

async function poll() {
  if (asking || !visible()) return;
  asking = true;
  try {
    const known = sources.get(latest);
    const query = known ? `?source=${latest}&point=${known.point}&change=${known.log.at(-1)?.number ?? -1}` : "";
    const view = await (await call(`world${query}`, { signal: AbortSignal.timeout(PATIENCE) })).json();
    notice(null);
    show(view);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    refused = error.status === 401;
    notice(refused ? "The live view needs an API key." : `${error.message} This view goes on by itself.`);
    setBadge("unknown", "Unknown", "off");
  } finally {
    asking = false;
    if (visible() && !refused) timer = setTimeout(poll, EVERY);
  }
}

function notice(text) {
  const element = find("world-notice");
  element.hidden = text === null;
  // What is shown is what was last known.
  find("world").classList.toggle("stale", text !== null);
  if (text === null) return;
  element.replaceChildren(make("span", "", text));
  if (!refused) return;
  const again = make("button", "quiet", "Give a key");
  again.addEventListener("click", () => {
    refused = false;
    poll();
  });
  element.append(again);
}

const visible = () => !find("world").hidden && document.visibilityState === "visible";

function show(view) {
  const known = sources.get(view.source) ?? { log: [], point: -1 };
  sources.set((latest = view.source), known);
  const fresh = view.points.filter((point) => point.number > known.point);
  known.point = fresh.at(-1)?.number ?? known.point;
  known.log = [...known.log, ...view.changes.filter((change) => change.number > (known.log.at(-1)?.number ?? -1))].slice(-MOST_LOGGED);
  points = [...points, ...fresh].filter((point) => view.now - point.at <= SPAN).sort((one, other) => one.at - other.at);
  const [name, kind] = STATES[view.state] ?? [view.state, "wait"];
  const hangs = view.progressing === "no";
  setBadge(view.state, hangs ? `${name}, no progress` : name, hangs ? "bad" : kind);
  setText(find("world-cause"), view.cause ?? "");
  fill(find("world-facts"), [
    ["Model", view.model],
    ["Runs on", `${view.runner}, ${view.dtype}`],
    ["Context", view.max_seq_len === null ? "–" : `${count.format(view.max_seq_len)} tokens`],
    ["Restarts", count.format(view.restarts)],
    ["Steps", view.engine === null ? "–" : count.format(view.engine.steps)],
    ["Preemptions", view.engine === null ? "–" : count.format(view.engine.preemptions)],
    ["Version", view.version],
    ["Runner chosen", view.runner_reason || "–"],
  ]);
  showRanks(view.ranks);
  showGauges(view);
  fill(find("frontend"), [
    ["Live", view.frontend.live],
    ["Queued", view.frontend.waiting],
    ["Finished", view.frontend.finished],
    ["Aborted", view.frontend.aborted],
    ["Timed out", view.frontend.timed_out],
    ["Failed", view.frontend.failed],
    ["Dead with the world", view.frontend.dead],
    ["Replayed", view.frontend.replayed],
    ["Refused", view.frontend.refused],
  ].map(([label, value]) => [label, count.format(value)]));
  for (const plot of plots) plot.draw(points, view.now);
  showLog(known.log);
}

function setBadge(state, text, kind) {
  const badge = find("world-state");
  badge.dataset.state = state;
  badge.className = `badge ${kind}`;
  setText(badge, text);
}

function showRanks(ranks) {
  const list = find("ranks");
  const shown = JSON.stringify(ranks);
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(
    ...ranks.map((rank) => {
      const item = make("li");
      item.append(make("b", "", `Rank ${rank.rank}`), make("span", `badge ${RANKS[rank.state]}`, rank.state));
      const share = rank.total ? ` ${Math.floor((100 * rank.done) / rank.total)} %` : "";
      const more = rank.cause ?? (rank.stage === null ? "" : `${rank.stage}${share}`);
      item.append(make("span", "soft", more || (rank.pid === null ? "" : `pid ${rank.pid}`)));
      return item;
    }),
  );
}

function showGauges({ engine, max_batch_size: most }) {
  const rows = [];
  if (engine !== null) {
    rows.push(["Running", engine.running, most, `${engine.running} of ${most}`]);
    rows.push(["Waiting", engine.waiting, Math.max(engine.waiting, most), count.format(engine.waiting)]);
    if (engine.kv_blocks) {
      rows.push(["KV cache", engine.kv_used, engine.kv_blocks, `${count.format(engine.kv_used)} of ${count.format(engine.kv_blocks)} blocks`]);
      rows.push(["Kept for reuse", engine.kv_cached, engine.kv_blocks, `${count.format(engine.kv_cached)} blocks`]);
    }
  }
  const box = find("gauges");
  if (!rows.length) {
    box.replaceChildren(make("p", "soft", "Nobody answers for the world now."));
    return;
  }
  if (box.childElementCount !== rows.length || box.firstElementChild.matches("p")) {
    box.replaceChildren(...rows.map(gauge));
  }
  rows.forEach(([, value, max, text], place) => {
    const row = box.children[place];
    setText(row.querySelector("b"), text);
    const bar = row.querySelector("[role=meter]");
    bar.setAttribute("aria-valuenow", value);
    bar.setAttribute("aria-valuemax", max);
    bar.firstElementChild.style.width = `${Math.min(100, (100 * value) / (max || 1))}%`;
  });
}

function gauge([name]) {
  const row = make("div", "gauge");
  const bar = make("div", "bar");
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-label", name);
  bar.setAttribute("aria-valuemin", 0);
  bar.append(make("i"));
  row.append(make("span", "", name), make("b"), bar);
  return row;
}

function showLog(log) {
  const list = find("log");
  const shown = `${latest} ${log.at(-1)?.number}`;
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  const rows = log.map((change) => {
    const [name, kind] = STATES[change.state] ?? [change.state, "wait"];
    const at = new Date(1000 * change.at);
    const item = make("li");
    const time = make("time", "", at.toLocaleTimeString([], { hourCycle: "h23" }));
    time.dateTime = at.toISOString();
    item.append(time, make("span", `badge ${kind}`, name), make("span", "", change.cause ?? ""));
    return item;
  });
  list.replaceChildren(...rows.reverse());
}

/** Called whenever the view comes to sight. */
export function watchWorld() {
  if (!plots.length) {
    const parent = find("plots");
    const both = (p50, p95) => [{ key: p50, name: "median" }, { key: p95, name: "95 %" }];
    plots = [
      new Plot(parent, { title: "Tokens per second", note: "whole world", series: [{ key: "tokens_per_second", name: "generated" }, { key: "prompt_tokens_per_second", name: "of prompts" }], show: number }),
      new Plot(parent, { title: "Requests", note: "whole world", series: [{ key: "running", name: "running" }, { key: "waiting", name: "waiting" }], show: number }),
      new Plot(parent, { title: "KV blocks in use", note: "whole world", series: [{ key: "kv_used", name: "" }], show: number }),
      new Plot(parent, { title: "Time to first token", note: "streams of the frontend that answers", series: both("ttft_p50", "ttft_p95"), show: milliseconds }),
      new Plot(parent, { title: "Inter-token latency", note: "whole world", series: both("itl_p50", "itl_p95"), show: milliseconds }),
    ];
  }
  clearTimeout(timer);
  poll();
}
