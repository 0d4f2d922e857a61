// Settings of the page and small helpers. report.py puts the three report_*.js files into one function, in strict mode.

const data = JSON.parse(document.getElementById("data").textContent);
const settings = { smoothing: 0, axis: "steps", logAll: false, hidden: new Set(), zoom: null };
const byId = (id) => document.getElementById(id);

// --- small helpers --------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}

const colour = (run) => `var(--c${run % 8})`;

function paint(swatch, run) {
  const stripes = `repeating-linear-gradient(90deg, ${colour(run)} 0 ${5 - Math.floor(run / 8)}px, transparent 0 7px)`;
  swatch.style.background = run < 8 ? colour(run) : stripes;
  return swatch;
}

const dashes = (run) => ["none", "7 4", "2 4"][Math.floor(run / 8) % 3];

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(3);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: size >= 1e5 ? 0 : 1 });
  return String(Number(value.toPrecision(5)));
}

function compact(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size < 1e-3) return value.toExponential(Number(value.toExponential(0)) === value ? 0 : 1);
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  const s = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

// Trained tokens or seconds at a step, between the points that the page holds.
function along(run, step, axis) {
  if (axis === "steps") return step;
  const { steps, [axis]: values } = data.runs[run].axes;
  let low = 0, high = steps.length - 1;
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const share = high === low ? 0 : (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + share * (values[high] - values[low]);
}

const showX = (x, axis) => axis === "seconds" ? duration(x) : compact(x);

// Exponential moving average without the pull of its start. A gap weighs as many thousandths of the chart's span as
// it is wide, so a curve with few points is smoothed less and runs of different length alike.
function smooth(steps, values, slider, span) {
  const weight = Math.min(Math.sqrt(slider), 0.999);
  let sum = 0, norm = 0, before = steps[0];
  return values.map((value, i) => {
    if (value === null) return null;
    const keep = weight ** ((steps[i] - before) / span * 1000);
    before = steps[i];
    sum = sum * keep + value;
    norm = norm * keep + 1;
    return sum / norm;
  });
}

function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function timeTicks(low, high, count) {
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400]
    .find((s) => (high - low) / s <= count);
  if (!step) return niceTicks(low, high, count);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {  // of exponents
  const ticks = [];
  const factors = high - low < 1.2 ? [1, 2, 3, 5, 7] : high - low < 3 ? [1, 3] : [1];
  const stride = Math.max(1, Math.ceil((high - low) / 6));
  for (let e = Math.floor(low); e <= high; e += stride) {
    for (const factor of factors) {
      const at = e + Math.log10(factor);
      if (at >= low && at <= high) ticks.push(at);
    }
  }
  return ticks;
}
