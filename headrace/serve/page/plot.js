// A plot over time: lines in SVG, words in HTML, colours from the style sheet, so that it changes with the theme by itself.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 120;
/** Seconds that are shown at most, and at least; in between, as far back as there is something to see. */
export const SPAN = 300;
const LEAST_SPAN = 60;
// Seconds between two points from which on the line is broken: nobody looked in between.
const GAP = 5;

function element(parent, ...what) {
  const made = make(...what);
  parent.append(made);
  return made;
}

/** The least of 1, 2, 5, 10, 20, ... that is not below `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value);
}

export class Plot {
  #points = [];
  #now = 0;
  #span = LEAST_SPAN;

  /** `series`: [{key, name}], at most two of them; `show`: a value as text with its unit. */
  constructor(parent, { title, note, series, show }) {
    this.series = series;
    this.show = show;
    const figure = element(parent, "figure", "plot card");
    const caption = element(figure, "figcaption", "");
    element(caption, "h3", "", title);
    this.values = element(caption, "span", "values");
    const frame = element(figure, "div", "frame");
    this.top = element(frame, "span", "top");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    frame.append(this.svg);
    this.lines = series.map((_, place) => this.#path(`line line${place}`));
    this.mark = this.#path("mark");
    const axis = element(figure, "div", "axis");
    this.begin = element(axis, "span", "");
    element(axis, "span", "note", note);
    element(axis, "span", "", "now");
    this.title = title;
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => this.#rest());
  }

  #path(className) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", className);
    path.setAttribute("vector-effect", "non-scaling-stroke");
    this.svg.append(path);
    return path;
  }

  #x(point) {
    return WIDTH * (1 - (this.#now - point.at) / this.#span);
  }

  /** `points`: in order of time, each with `at` in seconds and, by key, numbers or null. */
  draw(points, now) {
    this.#points = points;
    this.#now = now;
    this.#span = Math.min(SPAN, Math.max(LEAST_SPAN, now - (points[0]?.at ?? now)));
    this.begin.textContent = `${this.#span < 100 ? `${Math.round(this.#span)} s` : `${(this.#span / 60).toFixed(1)} min`} ago`;
    const values = points.flatMap((point) => this.series.map(({ key }) => point[key] ?? 0));
    const top = roundUp(Math.max(0, ...values));
    this.top.textContent = this.show(top);
    this.series.forEach(({ key }, place) => {
      let path = "";
      let before = null;
      for (const point of points) {
        const value = point[key];
        if (value === null) {
          before = null;
          continue;
        }
        const joined = before !== null && point.at - before.at <= GAP;
        const at = `${this.#x(point).toFixed(1)} ${(HEIGHT - 1 - (HEIGHT - 2) * (value / top)).toFixed(1)}`;
        // With a tail, so that a point that stands alone is seen too.
        path += joined ? `L${at}` : `M${at}h-4h4`;
        before = point;
      }
      this.lines[place].setAttribute("d", path);
    });
    if (!this.svg.matches(":hover")) this.#rest();
  }

  #rest() {
    this.mark.setAttribute("d", "");
    this.#tell(this.#points.at(-1));
    this.svg.setAttribute("aria-label", `${this.title}, since ${this.begin.textContent}; now ${this.values.textContent || "unknown"}`);
  }

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = (WIDTH * (event.clientX - box.left)) / box.width;
    const nearest = this.#points.reduce((best, point) => (best === null || Math.abs(this.#x(point) - x) < Math.abs(this.#x(best) - x) ? point : best), null);
    if (nearest === null) return;
    this.mark.setAttribute("d", `M${this.#x(nearest).toFixed(1)} 0V${HEIGHT}`);
    this.#tell(nearest, `${Math.round(this.#now - nearest.at)} s ago`);
  }

  #tell(point, when) {
    this.values.replaceChildren();
    if (point === undefined) return;
    this.series.forEach(({ key, name }, place) => {
      const value = point[key];
      element(this.values, "span", `key key${place}`, `${name ? `${name} ` : ""}${value === null ? "–" : this.show(value)} `);
    });
    if (when) element(this.values, "span", "when", when);
  }
}
