// --- controls -----------------------------------------------------------------------------------------------------

function controls() {
  byId("smoothing").addEventListener("input", (event) => {
    settings.smoothing = Number(event.target.value);
    byId("smoothing-value").textContent = settings.smoothing ? settings.smoothing.toFixed(2) : "off";
    drawAll();
  });
  byId("axis").addEventListener("change", (event) => { settings.axis = event.target.value; zoom(null); });
  byId("log-all").addEventListener("change", (event) => { settings.logAll = event.target.checked; drawAll(); });
  byId("reset-zoom").addEventListener("click", () => zoom(null));
  if (data.runs.length < 2) return;
  data.runs.forEach((run, index) => {
    const swatch = paint(element("span", { class: "swatch" }), index);
    const button = element("button", { type: "button", "aria-pressed": "true", title: "show or hide" }, swatch, run.name);
    button.addEventListener("click", () => {
      if (!settings.hidden.delete(index)) settings.hidden.add(index);
      button.setAttribute("aria-pressed", String(!settings.hidden.has(index)));
      drawAll();
    });
    byId("legend").append(button);
  });
}

// --- answers --------------------------------------------------------------------------------------------------

const PAGE = 10;
const answers = { page: 0, find: "" };

// Same prompt, same place among equal prompts: one row of the list.
function keyed(rows) {
  const seen = new Map();
  return new Map(rows.map((row) => {
    const nth = seen.get(row.prompt) || 0;
    seen.set(row.prompt, nth + 1);
    return [`${nth} ${row.prompt}`, row];
  }));
}

function chosen(select) {
  const [run, index] = select.value.split(":").map(Number);
  return { title: select.selectedOptions[0].textContent, rows: keyed(data.samples[run][index].rows) };
}

function side(title, row) {
  const box = element("div", { class: "side" }, element("h3", {}, title));
  box.append(element("div", { class: "answer" }, row ? row.completion : "–"));
  const more = row ? Object.entries(row.more).map(([name, value]) => `${name}: ${value}`).join(" · ") : "";
  if (more) box.append(element("div", { class: "more" }, more));
  return box;
}

function drawAnswers() {
  const [left, right] = [chosen(byId("left")), chosen(byId("right"))];
  const keys = [...new Set([...left.rows.keys(), ...right.rows.keys()])].filter((key) => {
    const text = [key, left.rows.get(key)?.completion, right.rows.get(key)?.completion].join("\n").toLowerCase();
    return text.includes(answers.find);
  });
  const pages = Math.max(1, Math.ceil(keys.length / PAGE));
  answers.page = Math.min(answers.page, pages - 1);
  byId("page").textContent = `${keys.length} prompts, page ${answers.page + 1} of ${pages}`;
  byId("previous").disabled = answers.page === 0;
  byId("next").disabled = answers.page === pages - 1;
  byId("pairs").replaceChildren(...keys.slice(answers.page * PAGE, (answers.page + 1) * PAGE).map((key) => {
    const [a, b] = [left.rows.get(key), right.rows.get(key)];
    const same = a && b && a.completion === b.completion;
    const prompt = element("div", { class: "prompt" }, (a || b).prompt);
    if (same && byId("left").value !== byId("right").value) prompt.append(element("span", { class: "same" }, "same answer"));
    const sides = element("div", { class: "sides" }, side(left.title, a), side(right.title, b));
    return element("article", { class: `pair${same ? "" : " changed"}` }, prompt, sides);
  }));
}

function startAnswers() {
  const options = data.samples.flatMap((groups, run) => groups.map((group, index) => {
    const step = group.step === 0 ? "before training" : `step ${group.step.toLocaleString("en-US")}`;
    return { value: `${run}:${index}`, run, text: data.runs.length > 1 ? `${data.runs[run].name}, ${step}` : step };
  }));
  const lastOf = (run) => options.filter((o) => o.run === run).pop();
  const runs = [...new Set(options.map((o) => o.run))];
  const first = runs.length > 1 ? lastOf(runs[0]) : options[0];
  const second = lastOf(runs[runs.length > 1 ? 1 : 0]);
  for (const [id, preset] of [["left", first], ["right", second]]) {
    byId(id).append(...options.map((o) => element("option", { value: o.value }, o.text)));
    byId(id).value = preset.value;
    byId(id).addEventListener("change", drawAnswers);
  }
  byId("find").addEventListener("input", (event) => { answers.find = event.target.value.toLowerCase(); answers.page = 0; drawAnswers(); });
  byId("previous").addEventListener("click", () => { answers.page -= 1; drawAnswers(); });
  byId("next").addEventListener("click", () => { answers.page += 1; drawAnswers(); });
  drawAnswers();
}

// --- start ----------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = (name) => { document.documentElement.dataset.theme = name; };
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
for (const swatch of document.querySelectorAll(".swatch[data-run]")) paint(swatch, Number(swatch.dataset.run));
if (byId("charts")) {
  controls();
  for (const figure of document.querySelectorAll("figure.chart")) all.push(new Chart(figure, data.charts[figure.dataset.chart]));
  drawAll();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
}
if (byId("samples")) startAnswers();
