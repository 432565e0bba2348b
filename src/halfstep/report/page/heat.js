// The heat map, module by exponent.

// Each part of a path keeps its two ends: which layer it is, is in the middle of the path.
function shortened(name, most) {
  const parts = name.split(".").map((part) => Array.from(part));
  const room = (limit) => parts.reduce((all, part) => all + Math.min(part.length, limit), parts.length - 1);
  let limit = Math.max(...parts.map((part) => part.length));
  while (limit > 3 && room(limit) > most) limit -= 1;
  const found = parts.map((part) => cut(part, limit)).join(".");
  return cut(Array.from(found), most);
}

function cut(letters, most) {
  if (letters.length <= most) return letters.join("");
  const front = Math.ceil((most - 1) / 2);
  return letters.slice(0, front).join("") + "…" + letters.slice(letters.length - (most - 1 - front)).join("");
}

function drawHeat() {
  const map = data.heat[$("role").value];
  const rows = map.rows.slice().reverse();
  const places = rows.map((_, index) => index);
  const most = Math.min(64, Math.max(18, Math.round(window.innerWidth / 22)));
  // Where there is no room for every name, the first one is at the top and the others show on hovering.
  const every = Math.ceil(rows.length * 11 / (height(rows) - 60));
  const labelled = places.filter((place) => (rows.length - 1 - place) % every === 0);
  const lines = edges(rows), notFinite = brokenPart(rows);
  const ends = notFinite.length ? (narrow() ? 0.72 : 0.9) : 1;
  Plotly.react("heat", [magnitudes(map, rows), ...lines, ...notFinite], layout({
    height: height(rows), uirevision: $("role").value,
    margin: { l: 20, r: 12, t: 8, b: 44 },
    xaxis: { title: { text: "exponent of the true magnitude" }, range: reach(map, lines), tickprefix: "2<sup>", ticksuffix: "</sup>",
      showgrid: false, nticks: narrow() ? 5 : 12, tickangle: 0, domain: [0, ends] },
    xaxis2: { domain: [ends + 0.02, 1], range: [-0.5, 1.5], tickvals: [0, 1], ticktext: ["inf", "NaN"], showgrid: false,
      tickangle: 0, fixedrange: true, tickfont: { size: narrow() ? 10 : 12, color: colour("--error") }, visible: notFinite.length > 0 },
    yaxis: {
      tickmode: "array", range: [-0.5, rows.length - 0.5], showgrid: false,
      tickvals: labelled, ticktext: labelled.map((place) => plain(shortened(rows[place].module || data.unnamed, most))),
      tickfont: { size: rows.length > 40 ? 9 : 11, family: colour("--mono") },
    },
  }), config);
  note(map);
}

function magnitudes(map, rows) {
  const share = (row) => row.counts.map((count) => (count ? Math.log10(count / row.total) : null));
  return {
    type: "heatmap", x: map.exponents, y: rows.map((_, index) => index), z: rows.map(share), zmin: -4, zmax: 0,
    xgap: 1, ygap: gap(rows), hoverinfo: "text", hoverongaps: false,
    text: rows.map((row) => row.counts.map((count, index) =>
      `${named(row)}<br>2<sup>${map.exponents[index]}</sup>: ${count} of ${row.total} numbers` +
      `<br>${row.dtype}, scale 2<sup>${row.scale}</sup>`)),
    colorscale: [[0, colour("--heat-0")], [0.5, colour("--heat-1")], [1, colour("--heat-2")]],
    showscale: !narrow() && map.exponents.length > 0, colorbar: {
      thickness: 10, outlinewidth: 0, len: Math.min(1, 260 / height(rows)), yanchor: "top", y: 1,
      tickvals: [-4, -3, -2, -1, 0], ticktext: ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
    },
  };
}

// What was inf or NaN has no exponent, and a place of its own beside those that have.
function brokenPart(rows) {
  if (!rows.some((row) => row.infs || row.nans)) return [];
  const counts = rows.map((row) => [row.infs, row.nans]);
  return [{
    type: "heatmap", x: [0, 1], y: rows.map((_, index) => index), xaxis: "x2", xgap: 1, ygap: gap(rows),
    z: counts.map((pair, index) => pair.map((count) => (count ? Math.log10(count / rows[index].ran) : null))),
    zmin: -4, zmax: 0, showscale: false, hoverinfo: "text", hoverongaps: false,
    text: counts.map((pair, index) => pair.map((count, kind) =>
      `${named(rows[index])}<br>${["inf", "NaN"][kind]}: ${count} of ${rows[index].ran} numbers, as it ran`)),
    colorscale: [[0, colour("--bad-0")], [1, colour("--bad-1")]],
  }];
}

function named(row) {
  return plain(row.module) || data.unnamed;
}

function gap(rows) {
  return rows.length > 60 ? 0 : 1;
}

// All the numbers, and those ends of the formats that are near them.
function reach(map, lines) {
  if (!map.exponents.length) return [-26, 17];
  const bounds = lines.flatMap((trace) => trace.x.filter((each) => each !== null));
  const near = bounds.filter((each) => each > map.exponents[0] - 16 && each < map.exponents[map.exponents.length - 1] + 16);
  const [low, high] = extremes([...map.exponents, ...near]);
  return [low - 1, high + 1];
}

function height(rows) {
  return Math.max(220, Math.min(1400, 90 + rows.length * (rows.length > 40 ? 13 : 22)));
}

function windowOf(row) {
  const chosen = $("format").value, scale = $("scale").value;
  const ends = data.windows[chosen === "own" ? row.dtype : chosen];
  const by = scale === "own" ? row.scale : backward() ? Number(scale) : 0;
  return { zero: ends.zero - by, subnormal: ends.subnormal - by, largest: ends.largest - by };
}

function backward() {
  return data.heat[$("role").value].phase === "backward";
}

// Each line lies on a broader one, so that it is seen on light cells and on dark ones.
function edges(rows) {
  const ends = [["zero", "solid"], ["subnormal", "dash"], ["largest", "dot"]];
  return ends.flatMap(([name, dash]) => {
    const points = edge(rows, name), common = { ...points, mode: "lines", hoverinfo: "skip", cliponaxis: true };
    return [
      { ...common, name: "around", line: { color: colour("--card"), width: 4 } },
      { ...common, name, line: { color: colour("--ink"), width: 1.25, dash, shape: "linear" } },
    ];
  });
}

function edge(rows, name) {
  const x = [], y = [];
  rows.forEach((row, index) => {
    // A cell reaches half an exponent to either side of its middle.
    const end = windowOf(row)[name] - 0.5;
    if (index && x[x.length - 1] !== end) {
      x.push(null);
      y.push(null);
    }
    x.push(end, end);
    y.push(index - 0.5, index + 0.5);
  });
  return { x, y };
}

function note(map) {
  let lost = 0, over = 0, all = 0;
  for (const row of map.rows) {
    const ends = windowOf(row);
    row.counts.forEach((count, index) => {
      all += count;
      if (map.exponents[index] + 1 <= ends.zero) lost += count;
      if (map.exponents[index] > ends.largest) over += count;
    });
  }
  const part = (count) => `${Number((100 * count / all).toPrecision(3))}\u00a0%`;
  $("heat-note").textContent = !all ? "None of the numbers of these tensors is finite and not 0." : `Of the numbers of these tensors that are not 0, ${part(lost)} become 0 and ${part(over)} become inf.`;
}

function titled(map) {
  if (map.exponents.length) return map.role;
  return `${map.role} (${map.rows.some((row) => row.infs || row.nans) ? "nothing finite" : "only zeros"})`;
}

function prepareHeat() {
  const groups = { forward: "Forward pass", backward: "Backward pass" };
  for (const [phase, label] of Object.entries(groups)) {
    const group = Object.assign(document.createElement("optgroup"), { label });
    data.heat.forEach((map, index) => map.phase === phase && group.append(option(index, titled(map))));
    if (group.children.length) $("role").append(group);
  }
  $("role").value = data.opened.role;
  $("format").append(option("own", "the one in use"), ...["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"].map((each) => option(each, each)));
  $("scale").append(option("own", "the one in force"));
  $("format").value = data.opened.format;
  for (let power = 0; power <= 24; power += 4) $("scale").append(option(power, `2^${power}`));
  const choose = () => { $("scale").disabled = !backward(); drawHeat(); };
  for (const name of ["role", "format", "scale"]) $(name).addEventListener("change", choose);
  choose();
}
