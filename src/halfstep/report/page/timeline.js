// The loss and the loss scale of each step.

function drawTimeline() {
  const { step, loss, scale, skipped, broken } = data.timeline;
  const at = new Map(step.map((number, index) => [number, index]));
  const finite = loss.filter((each) => each !== null), scales = scale.filter((each) => each !== null);
  const hasLoss = finite.length + broken.length > 0, hasScale = scales.length > 0;
  const top = hasLoss && hasScale ? [0.42, 1] : [0, 1], bottom = hasLoss ? [0, 0.32] : [0, 1];
  const values = hasScale ? scale : loss;
  const height = (number) => values[at.get(number)] ?? (hasScale ? scales : finite)[0] ?? 0;
  const traces = [...(hasLoss ? losses(step, loss, finite, broken) : []), ...(hasScale ? [{
    x: step, y: scale, name: "scale", yaxis: "y2", mode: "lines",
    line: { color: colour("--quiet"), width: 1.5, shape: "hv" },
    hovertemplate: "step %{x}<br>scale %{y}<extra></extra>",
  }] : []), {
    x: skipped.map((each) => each[0]), y: skipped.map((each) => height(each[0])), name: "skipped",
    yaxis: hasScale ? "y2" : "y", mode: "markers", cliponaxis: false, hoverinfo: "text",
    marker: { size: 9, symbol: "x-thin", line: { width: 1.75, color: colour("--mark") } },
    text: skipped.map(([number, why]) => `step ${number} skipped<br>${plain(why)}`),
  }];
  Plotly.react("timeline", traces, layout({
    height: finite.length && hasScale ? 380 : 260,
    xaxis: { title: { text: "step" }, anchor: hasScale ? "y2" : "y", range: around(step), ...whole(step) },
    yaxis: { title: { text: hasLoss ? "loss" : "" }, domain: top, tickformat: ".4~g", visible: hasLoss || !hasScale,
      ...(finite.length ? {} : { showticklabels: false, showgrid: false, range: [-1, 1] }) },
    yaxis2: { title: { text: "loss scale" }, domain: bottom, type: "log", dtick: "D2", exponentformat: "power",
      ...powers(scale) },
    annotations: finite.length ? [] : [{
      text: broken.length ? "no loss was finite" : "no loss was seen", showarrow: false,
      xref: "paper", yref: "paper", x: 0.5, y: (top[0] + 3 * top[1]) / 4, font: { size: 13, color: colour("--ink") },
    }],
  }), config);
}

function losses(step, loss, finite, broken) {
  const ceiling = finite.length ? extremes(finite)[1] : 0;
  return [{
    x: step, y: loss, name: "loss", mode: step.length > 60 ? "lines" : "lines+markers",
    line: { color: colour("--link"), width: 1.5 }, marker: { size: 4 },
    hovertemplate: "step %{x}<br>loss %{y}<extra></extra>",
  }, {
    x: broken.map((each) => each[0]), y: broken.map(() => ceiling), name: "not finite",
    mode: "markers", marker: { size: 8, symbol: "triangle-up", color: colour("--mark") }, cliponaxis: false,
    text: broken.map(([number, value]) => `step ${number}<br>loss ${value}`), hoverinfo: "text",
  }];
}

// A few steps are counted one by one, and none stands on the edge.
function whole(step) {
  return step.length <= 12 ? { tickmode: "linear", tick0: 1, dtick: 1 } : {};
}

function around(step) {
  const first = step[0], last = step[step.length - 1], room = Math.max(0.5, (last - first) * 0.015);
  return [first - room, last + room];
}

// Scales are powers of two, so these are the marks of their axis.
function powers(values) {
  const there = values.filter((each) => each !== null && each > 0).map(Math.log2);
  if (!there.length) return {};
  const low = Math.floor(Math.min(...extremes(there))), high = Math.ceil(Math.max(...extremes(there)));
  const every = Math.max(1, Math.ceil((high - low) / 5)), marks = [];
  for (let power = low; power <= high; power += every) marks.push(power);
  const room = Math.max(0.15, (high - low) * 0.08) * Math.LOG10E * Math.LN2;
  return {
    tickmode: "array", tickvals: marks.map((each) => 2 ** each), ticktext: marks.map((each) => `2<sup>${each}</sup>`),
    range: [low * Math.log10(2) - room, high * Math.log10(2) + room],
  };
}

function extremes(values) {
  return values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
}
