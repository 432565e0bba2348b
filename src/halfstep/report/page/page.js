"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads a few tags in its texts.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const option = (value, text) => Object.assign(document.createElement("option"), { value, textContent: text });
  const narrow = () => window.innerWidth < 640;
  const config = {
    displaylogo: false, responsive: true, displayModeBar: false,
    doubleClick: "reset", plotlyServerURL: "", showTips: false,
  };

  function layout(more) {
    const axis = {
      gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line"),
      automargin: true, tickfont: { size: 12 },
    };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: colour("--sans"), color: colour("--quiet"), size: 12 },
      margin: { l: 50, r: 12, t: 12, b: 40 }, hovermode: "closest", dragmode: "zoom",
      hoverlabel: {
        bgcolor: colour("--card"), bordercolor: colour("--line"), align: "left",
        font: { color: colour("--ink"), family: colour("--sans"), size: 12 },
      },
    };
    for (const name of Object.keys(more)) {
      if (/^[xy]axis/.test(name)) more[name] = { ...axis, ...more[name] };
    }
    return { ...base, ...more };
  }

  function drawTimeline() {
    const { step, loss, scale, skipped, broken } = data.timeline;
    const at = new Map(step.map((number, index) => [number, index]));
    const hasLoss = loss.some((each) => each !== null), hasScale = scale.some((each) => each !== null);
    const top = hasLoss && hasScale ? [0.42, 1] : [0, 1], bottom = hasLoss ? [0, 0.32] : [0, 1];
    const mark = { size: 9, symbol: "x-thin", line: { width: 1.75, color: colour("--mark") } };
    const traces = [];
    if (hasLoss) {
      traces.push({
        x: step, y: loss, name: "loss", mode: step.length > 60 ? "lines" : "lines+markers",
        line: { color: colour("--link"), width: 1.5 }, marker: { size: 4 },
        hovertemplate: "step %{x}<br>loss %{y}<extra></extra>",
      });
      const values = loss.filter((each) => each !== null);
      const ceiling = values.reduce((most, each) => Math.max(most, each), values[0]);
      traces.push({
        x: broken.map((each) => each[0]), y: broken.map(() => ceiling), name: "not finite",
        mode: "markers", marker: { size: 8, symbol: "triangle-up", color: colour("--mark") },
        text: broken.map(([number, value]) => `step ${number}<br>loss ${value}`), hoverinfo: "text",
      });
    }
    if (hasScale) {
      traces.push({
        x: step, y: scale, name: "scale", yaxis: "y2", mode: "lines",
        line: { color: colour("--quiet"), width: 1.5, shape: "hv" },
        hovertemplate: "step %{x}<br>scale %{y}<extra></extra>",
      });
    }
    const height = (number) => {
      const index = at.get(number), values = hasScale ? scale : loss;
      return values[index] ?? values.find((each) => each !== null) ?? 0;
    };
    traces.push({
      x: skipped.map((each) => each[0]), y: skipped.map((each) => height(each[0])), name: "skipped",
      yaxis: hasScale ? "y2" : "y", mode: "markers", marker: mark, cliponaxis: false,
      text: skipped.map(([number, why]) => `step ${number} skipped<br>${plain(why)}`), hoverinfo: "text",
    });
    Plotly.react("timeline", traces, layout({
      height: hasLoss && hasScale ? 380 : 260,
      xaxis: { title: { text: "step" }, anchor: hasScale ? "y2" : "y" },
      yaxis: { title: { text: hasLoss ? "loss" : "" }, domain: top, visible: hasLoss || !hasScale },
      yaxis2: { title: { text: "loss scale" }, domain: bottom, type: "log", dtick: "D2", exponentformat: "power",
        ...powers(scale) },
    }), config);
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

  function shortened(name, most) {
    const letters = Array.from(name);
    if (letters.length <= most) return name;
    const kept = most - 1, front = Math.floor(kept / 3);
    return letters.slice(0, front).join("") + "…" + letters.slice(letters.length - (kept - front)).join("");
  }

  function drawHeat() {
    const map = data.heat[$("role").value];
    const rows = map.rows.slice().reverse();
    const share = (row) => row.counts.map((count) => (count ? Math.log10(count / row.total) : null));
    const places = rows.map((_, index) => index);
    const most = narrow() ? 14 : 40;
    // Where there is no room for every name, the first one is at the top and the others show on hovering.
    const every = Math.ceil(rows.length * 11 / (height(rows) - 60));
    const labelled = places.filter((place) => (rows.length - 1 - place) % every === 0);
    const traces = [{
      type: "heatmap", x: map.exponents, y: places, z: rows.map(share), zmin: -4, zmax: 0,
      xgap: 1, ygap: rows.length > 60 ? 0 : 1, hoverinfo: "text", hoverongaps: false,
      text: rows.map((row) => row.counts.map((count, index) =>
        `${plain(row.module) || "(outermost)"}<br>2<sup>${map.exponents[index]}</sup>: ${count} of ${row.total} numbers` +
        `<br>${row.dtype}, scale 2<sup>${row.scale}</sup>`)),
      colorscale: [[0, colour("--heat-0")], [0.5, colour("--heat-1")], [1, colour("--heat-2")]],
      showscale: !narrow(), colorbar: {
        thickness: 10, outlinewidth: 0, len: Math.min(1, 260 / height(rows)), yanchor: "top", y: 1,
        tickvals: [-4, -3, -2, -1, 0], ticktext: ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
      },
    }, ...edges(rows)];
    const bounds = traces.slice(1).flatMap((trace) => trace.x.filter((each) => each !== null));
    const near = bounds.filter((each) => each > map.exponents[0] - 16 && each < map.exponents[map.exponents.length - 1] + 16);
    const [low, high] = extremes([...map.exponents, ...near]);
    Plotly.react("heat", traces, layout({
      height: height(rows), uirevision: $("role").value,
      margin: { l: 20, r: 12, t: 8, b: 44 },
      xaxis: { title: { text: "exponent of the true magnitude" }, range: [low - 1, high + 1], tickprefix: "2<sup>", ticksuffix: "</sup>",
        showgrid: false, nticks: narrow() ? 5 : 12, tickangle: 0 },
      yaxis: {
        tickmode: "array", range: [-0.5, rows.length - 0.5], showgrid: false,
        tickvals: labelled, ticktext: labelled.map((place) => plain(shortened(rows[place].module || "(outermost)", most))),
        tickfont: { size: rows.length > 40 ? 9 : 11, family: colour("--mono") },
      },
    }), config);
    note(map);
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

  function edges(rows) {
    const line = (name, dash) => {
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
      return { x, y, name, mode: "lines", hoverinfo: "skip", cliponaxis: true,
        line: { color: colour("--ink"), width: 1.25, dash, shape: "linear" } };
    };
    return [line("zero", "solid"), line("subnormal", "dash"), line("largest", "dot")];
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
    const part = (count) => (all ? `${Number((100 * count / all).toPrecision(3))} %` : "none");
    $("heat-note").textContent = `Of the numbers of these tensors that are not 0, ${part(lost)} become 0 and ${part(over)} become inf.`;
  }

  function prepareHeat() {
    const groups = { forward: "Forward pass", backward: "Backward pass" };
    for (const [phase, label] of Object.entries(groups)) {
      const group = Object.assign(document.createElement("optgroup"), { label });
      data.heat.forEach((map, index) => map.phase === phase && group.append(option(index, map.role)));
      if (group.children.length) $("role").append(group);
    }
    const gradients = data.heat.findIndex((map) => map.role === "grad_output");
    if (gradients >= 0) $("role").value = gradients;
    $("format").append(option("own", "the one in use"), ...["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"].map((each) => option(each, each)));
    $("scale").append(option("own", "the one in force"));
    for (let power = 0; power <= 24; power += 4) $("scale").append(option(power, `2^${power}`));
    const choose = () => { $("scale").disabled = !backward(); drawHeat(); };
    for (const name of ["role", "format", "scale"]) $(name).addEventListener("change", choose);
    choose();
  }

  function prepareSearch() {
    const box = $("search"), rows = Array.from($(box.dataset.table).tBodies[0].rows);
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const filter = () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !words.every((word) => texts.get(row).includes(word));
        shown += !row.hidden;
      }
      $("search-count").textContent = `${shown} of ${rows.length}`;
    };
    box.addEventListener("input", filter);
    filter();
  }

  function prepareSorting(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "sort" });
      button.append(...head.childNodes);
      head.append(button);
      if (head.dataset.kind !== "text") head.classList.add("n");
      button.addEventListener("click", () => sortBy(table, heads, column));
    });
  }

  function sortBy(table, heads, column) {
    const isText = heads[column].dataset.kind === "text";
    const before = heads[column].getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : isText ? "ascending" : "descending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1, body = table.tBodies[0];
    const value = (row) => isText ? row.cells[column].textContent : row.cells[column].dataset.value;
    const compare = isText ? (a, b) => a.localeCompare(b, "en", { numeric: true }) : (a, b) => a - b;
    body.append(...Array.from(body.rows).sort((a, b) => sign * compare(value(a), value(b))));
  }

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  function draw() {
    if ($("timeline")) drawTimeline();
    if ($("heat")) drawHeat();
  }

  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
  for (const table of document.querySelectorAll(".sortable")) prepareSorting(table);
  if ($("search")) prepareSearch();
  if ($("timeline")) drawTimeline();
  if ($("heat")) prepareHeat();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
