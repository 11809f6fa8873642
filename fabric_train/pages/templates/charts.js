"use strict";
const { charts, axes, config } = JSON.parse(document.getElementById("chart-data").textContent);
const controls = document.querySelector(".controls");
const titles = { step: "optimizer step", tokens: "tokens", hours: "hours of training steps" };
const state = { axis: "step", smooth: true, log: false, domain: null };
const views = new Map();

/* Return tokens or hours at a step, between the known steps of its run. */
function atStep(run, name, step) {
  const steps = run.step, values = run[name];
  let low = 0, high = steps.length - 1;
  if (high < 1 || step <= steps[0]) return high < 0 ? step : values[0];
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]);
}

/* Return what places the steps of a run on the chosen axis. */
function placeOn(run) {
  return step => state.axis !== "step" && axes[run] ? atStep(axes[run], state.axis, step) : step;
}

function rowsOf(one) {
  const place = placeOn(one.axis);
  const rows = one.x.map((step, index) => {
    const mean = one.smooth ? one.smooth[index] : null;
    const row = { series: one.name, x: place(step), step, y: one.y[index] };
    row.drawn = state.smooth && mean !== null ? mean : row.y;
    for (const name of ["smooth", "low", "high"]) if (one[name]) row[name] = one[name][index];
    return row;
  }).filter(row => !state.log || (row.y > 0 && row.drawn > 0));
  if (!state.domain) return rows;
  const [first, last] = state.domain;
  return rows.filter((row, index) => {  /* with the neighbours, so that the curve reaches the edge */
    const before = rows[index - 1], after = rows[index + 1];
    return (after ? after.x : row.x) >= first && (before ? before.x : row.x) <= last;
  });
}

/* Vega-Lite replaces other characters in the names of signals, such as the hyphen of a metric's chart. */
function brushOf(chart) {
  return chart.key.replace(/\W/g, "_") + "_brush";
}

function specification(chart) {
  const spec = structuredClone(chart.spec);
  const kinds = { points: [], levels: [] };
  for (const one of chart.series) kinds[one.kind === "level" ? "levels" : "points"].push(...rowsOf(one));
  const place = placeOn(0);
  const marks = chart.marks.map(mark => ({ ...mark, x: place(mark.x) }))
    .filter(mark => !state.domain || (mark.x >= state.domain[0] && mark.x <= state.domain[1]));
  spec.datasets = { ...kinds, marks };
  spec.width = "container";
  spec.height = Math.max(160, Math.min(300, window.innerHeight * 0.34));
  spec.config = config;
  spec.layer = spec.layer.filter(layer => state.smooth || layer.name !== "raw");
  const brush = { name: brushOf(chart), select: { type: "interval", encodings: ["x"] } };
  for (const layer of spec.layer) {
    const { x, y } = layer.encoding;
    if (x) {
      x.title = titles[state.axis];
      if (state.axis === "hours") delete x.axis;  /* which need not be whole numbers */
      if (state.domain) x.scale = { domain: state.domain, nice: false };
    }
    if (y && y.scale && state.log) y.scale = { type: "log" };
    if (layer.mark.type === "line") layer.mark.clip = true;
    if (layer.name === "hover" && state.axis !== "step") {
      layer.encoding.tooltip[1].title = titles[state.axis];
      layer.encoding.tooltip.push({ field: "step", title: titles.step, format: "," });
    }
  }
  spec.layer.find(layer => layer.params).params.push(brush);
  return spec;
}

/* Vega-Lite looks for words in the Voronoi cell under the pointer instead of in the cell's point. */
function patch(spec) {
  for (const { encode } of spec.marks) {
    const found = encode && encode.update;
    if (found && found.isVoronoi) found.tooltip.signal = found.tooltip.signal.replaceAll('datum["series"]', 'datum.datum["series"]');
  }
  return spec;
}

async function draw(chart) {
  const place = document.getElementById("chart-" + chart.key);
  if (views.has(chart.key)) views.get(chart.key).finalize();
  const options = { mode: "vega-lite", actions: false, ast: true, renderer: "canvas", patch };
  const result = await vegaEmbed(place, specification(chart), options);
  views.set(chart.key, result);
  let chosen = null;
  result.view.addSignalListener(brushOf(chart), (_, value) => { chosen = value && value.x; });
  place.onpointerup = () => {
    if (!chosen || chosen.length !== 2 || chosen[0] === chosen[1]) return;
    state.domain = [Math.min(...chosen), Math.max(...chosen)];
    drawAll();
  };
  place.ondblclick = () => { state.domain = null; drawAll(); };
}

let drawing = Promise.resolve();
function drawAll() {
  drawing = drawing.then(async () => { for (const chart of charts) await draw(chart); })
    .then(() => { document.body.dataset.drawn = "true"; });
  return drawing;
}

if (controls) {
  controls.addEventListener("change", event => {
    const { name, value, checked } = event.target;
    if (name === "axis") { state.axis = value; state.domain = null; } else state[name] = checked;
    drawAll();
  });
  controls.addEventListener("submit", event => event.preventDefault());
  controls.elements.reset.addEventListener("click", () => { state.domain = null; drawAll(); });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
drawAll();
