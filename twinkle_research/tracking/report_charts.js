// --- charts ---------------------------------------------------------------------------------------------------

const HEIGHT = 232, LEFT = 52, RIGHT = 14, TOP = 10, BOTTOM = 24;
const all = [];

class Chart {
  constructor(figure, content) {
    this.figure = figure;
    this.content = content;
    this.log = false;
    this.svg = shape("svg", { tabindex: 0, role: "img", height: HEIGHT }, figure);
    this.tip = element("div", { class: "tip", hidden: "" });
    this.note = element("span", { class: "note" });
    figure.append(this.tip, this.note);
    this.button = figure.querySelector(".log");
    this.button.addEventListener("click", () => { this.log = !this.log; this.draw(); });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.startZoom(event));
    this.svg.addEventListener("pointerup", (event) => this.endZoom(event));
    this.svg.addEventListener("pointercancel", () => { this.from = null; });
    this.svg.addEventListener("pointerleave", () => { if (this.from == null) hover(null); });
    this.svg.addEventListener("dblclick", () => zoom(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => hover(null));
  }

  logged() { return this.log || settings.logAll; }

  prepare() {
    this.hiddenPoints = 0;
    const span = Math.max(1, ...this.content.curves.map((c) => c.x[c.x.length - 1] - c.x[0]));
    this.lines = this.content.curves.filter((c) => !settings.hidden.has(c.run)).map((c) => {
      const xs = c.x.map((step) => along(c.run, step, settings.axis));
      const map = (y) => {
        if (y === null || !this.logged()) return y;
        if (y > 0) return Math.log10(y);
        this.hiddenPoints += 1;
        return null;
      };
      const soft = settings.smoothing ? smooth(c.x, c.y, settings.smoothing, span) : null;
      return { run: c.run, steps: c.x, xs, ys: c.y.map(map), soft: soft && soft.map(map), values: c.y, softValues: soft };
    });
  }

  range() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of this.lines) for (const x of line.xs) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
    if (settings.zoom) [x0, x1] = settings.zoom;
    for (const line of this.lines) line.ys.forEach((y, i) => {
      if (y === null || line.xs[i] < x0 || line.xs[i] > x1) return;
      y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    });
    if (!(x1 > x0)) { x0 = Number.isFinite(x0) ? x0 - 1 : 0; x1 = x0 + 2; }
    if (!(y1 >= y0)) { y0 = 0; y1 = 1; }
    const pad = y1 > y0 ? (y1 - y0) * 0.06 : Math.abs(y0) * 0.1 || 1;
    const floor = !this.logged() && y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad;
    this.x = [x0, x1];
    this.y = [floor, y1 + pad];
  }

  px(x) { return LEFT + (x - this.x[0]) / (this.x[1] - this.x[0]) * (this.width - LEFT - RIGHT); }
  py(y) { return HEIGHT - BOTTOM - (y - this.y[0]) / (this.y[1] - this.y[0]) * (HEIGHT - TOP - BOTTOM); }
  unpx(pixel) { return this.x[0] + (pixel - LEFT) / (this.width - LEFT - RIGHT) * (this.x[1] - this.x[0]); }

  draw() {
    this.width = Math.max(240, this.svg.clientWidth || this.figure.clientWidth - 24);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.prepare();
    this.range();
    this.button.setAttribute("aria-pressed", String(this.logged()));
    this.note.textContent = this.notes().join(" · ");
    this.axes();
    const clip = `clip${all.indexOf(this)}`;
    const box = { x: LEFT, y: TOP - 4, width: this.width - LEFT - RIGHT + 5, height: HEIGHT - TOP - BOTTOM + 8 };
    shape("rect", box, shape("clipPath", { id: clip }, this.svg));
    const group = shape("g", { "clip-path": `url(#${clip})` }, this.svg);
    for (const line of this.lines) {
      const style = { stroke: colour(line.run), "stroke-dasharray": dashes(line.run), "data-run": line.run };
      shape("path", { ...style, d: this.path(line.xs, line.ys), class: `curve raw${line.soft ? " faint" : ""}` }, group);
      if (line.soft) shape("path", { ...style, d: this.path(line.xs, line.soft), class: "curve soft" }, group);
      if (line.xs.length <= 40) line.ys.forEach((y, i) => y !== null && shape("circle",
        { cx: this.px(line.xs[i]), cy: this.py(y), r: 3, fill: colour(line.run), class: "dot", opacity: line.soft ? 0.35 : 1 }, group));
    }
    this.marks = shape("g", {}, this.svg);
    this.svg.setAttribute("aria-label", this.describe());
  }

  path(xs, ys) {
    let path = "", pen = "M";
    ys.forEach((y, i) => {
      if (y === null) { pen = "M"; return; }
      path += `${pen}${this.px(xs[i]).toFixed(1)} ${this.py(y).toFixed(1)}`;
      pen = "L";
    });
    return path;
  }

  notes() {
    const curves = this.content.curves.filter((c) => !settings.hidden.has(c.run));
    const total = (count) => curves.reduce((sum, c) => sum + count(c), 0).toLocaleString("en-US");
    const [rows, drawn] = [total((c) => c.rows), total((c) => c.x.length)];
    const infinite = total((c) => c.y.filter((y) => y === null).length);
    return [
      ...(rows === drawn ? [] : [`${drawn} of ${rows} points drawn`]),
      ...(infinite === "0" ? [] : [`${infinite} values not finite`]),
      ...(this.hiddenPoints ? [`${this.hiddenPoints} values ≤ 0 not drawn`] : []),
    ];
  }

  axes() {
    const ticks = this.logged() ? logTicks(...this.y) : niceTicks(...this.y, 4);
    for (const y of ticks) {
      shape("line", { x1: LEFT, x2: this.width - RIGHT, y1: this.py(y), y2: this.py(y), class: "rule" }, this.svg);
      shape("text", { x: LEFT - 7, y: this.py(y) + 4, "text-anchor": "end" }, this.svg)
        .textContent = compact(this.logged() ? Number((10 ** y).toPrecision(6)) : y);
    }
    const base = HEIGHT - BOTTOM;
    shape("line", { x1: LEFT, x2: this.width - RIGHT, y1: base, y2: base, class: "base" }, this.svg);
    const count = Math.max(2, Math.floor((this.width - LEFT) / 90));
    const along = settings.axis === "seconds" ? timeTicks(...this.x, count) : niceTicks(...this.x, count);
    for (const x of along) {
      if (settings.axis === "steps" && !Number.isInteger(x)) continue;
      const anchor = this.px(x) > this.width - 30 ? "end" : "middle";
      shape("text", { x: this.px(x), y: HEIGHT - 7, "text-anchor": anchor }, this.svg).textContent = showX(x, settings.axis);
    }
  }

  describe() {
    return `${this.content.metric}: ` + this.lines.map((line) => {
      const known = line.values.map((v, i) => [line.steps[i], v]).filter(([, v]) => v !== null);
      if (!known.length) return "no finite value";
      const [first, last] = [known[0], known[known.length - 1]];
      const name = data.runs.length > 1 ? `${data.runs[line.run].name} ` : "";
      return `${name}${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
    }).join("; ");
  }

  // Index of the point of a curve nearest to x.
  nearest(line, x) {
    let best = 0;
    line.xs.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(line.xs[best] - x)) best = i; });
    return best;
  }

  mark(x, own) {
    this.marks.replaceChildren();
    this.tip.hidden = true;
    if (x === null || !this.lines.length) return;
    // The curve with the nearest point decides where the cross stands, so that sparse curves can be read too.
    const hits = this.lines.map((line) => ({ line, i: this.nearest(line, x) }));
    const distance = (hit) => Math.abs(hit.line.xs[hit.i] - x);
    const at = hits.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const cross = at.line.xs[at.i];
    if (cross < this.x[0] || cross > this.x[1]) return;
    shape("line", { x1: this.px(cross), x2: this.px(cross), y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" }, this.marks);
    const near = (this.x[1] - this.x[0]) * 0.02;
    const shown = hits.filter((hit) => Math.abs(hit.line.xs[hit.i] - cross) <= near);
    for (const { line, i } of shown) {
      const y = (line.soft || line.ys)[i];
      if (y !== null) shape("circle", { cx: this.px(line.xs[i]), cy: this.py(y), r: 4.5, fill: colour(line.run), class: "dot" }, this.marks);
    }
    if (own) this.showTip(at, shown);
  }

  showTip(at, shown) {
    const step = at.line.steps[at.i];
    const head = [`step ${step.toLocaleString("en-US")}`];
    const tokens = along(at.line.run, step, "tokens"), seconds = along(at.line.run, step, "seconds");
    if (tokens) head.push(`${compact(tokens)} tokens`);
    if (seconds) head.push(duration(seconds));
    this.tip.replaceChildren(element("div", { class: "head" }, head.join(" · ")));
    for (const { line, i } of shown) {
      const row = element("div");
      const swatch = paint(element("span", { class: "swatch" }), line.run);
      row.append(swatch, element("span", { class: "name" }, data.runs.length > 1 ? data.runs[line.run].name : this.content.metric));
      row.append(element("b", {}, number(line.values[i])));
      if (line.softValues && line.values[i] !== null) row.append(element("span", { class: "soft" }, `~ ${number(line.softValues[i])}`));
      this.tip.append(row);
    }
    this.tip.hidden = false;
    const [box, frame] = [this.svg.getBoundingClientRect(), this.figure.getBoundingClientRect()];
    const x = this.px(at.line.xs[at.i]) * box.width / this.width + box.left - frame.left;
    const left = x + 14 + this.tip.offsetWidth > this.figure.clientWidth ? x - this.tip.offsetWidth - 14 : x + 14;
    this.tip.style.left = `${Math.max(2, left)}px`;
    this.tip.style.top = `${box.top - frame.top + 6}px`;
  }

  pixel(event) {
    const box = this.svg.getBoundingClientRect();
    return (event.clientX - box.left) * this.width / box.width;
  }

  point(event) {
    const pixel = this.pixel(event);
    hover(this.unpx(pixel), this);
    if (this.from == null) return;
    const [a, b] = [Math.min(this.from, pixel), Math.max(this.from, pixel)];
    shape("rect", { x: a, y: TOP, width: b - a, height: HEIGHT - TOP - BOTTOM, class: "zoom" }, this.marks);
  }

  startZoom(event) {
    if (event.pointerType === "touch" || event.button !== 0) return;
    this.from = this.pixel(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  endZoom(event) {
    const [from, to] = [this.from, this.pixel(event)];
    this.from = null;
    if (from != null && Math.abs(to - from) > 6) zoom([this.unpx(Math.min(from, to)), this.unpx(Math.max(from, to))]);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") zoom(null);
    if (!move || !this.lines.length) return;
    event.preventDefault();
    const line = this.lines[0];
    const i = this.at == null ? (move > 0 ? 0 : line.xs.length - 1) : this.nearest(line, this.at) + move;
    hover(line.xs[Math.min(line.xs.length - 1, Math.max(0, i))], this);
  }
}

function hover(x, source) {
  for (const chart of all) { chart.at = x; chart.mark(x, chart === source); }
}

function zoom(range) {
  settings.zoom = range;
  byId("reset-zoom").hidden = range === null;
  drawAll();
}

function drawAll() { for (const chart of all) chart.draw(); }
