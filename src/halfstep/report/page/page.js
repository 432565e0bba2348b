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
  const value = (row) => isText ? row.cells[column].textContent : Number(row.cells[column].dataset.value);
  const compare = isText ? (a, b) => a.localeCompare(b, "en", { numeric: true }) : (a, b) => (a > b) - (a < b);
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

// The plots' own script is most of the page, and a third of that when it is packed.
async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function draw() {
  if ($("timeline")) drawTimeline();
  if ($("heat")) drawHeat();
}

for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
for (const table of document.querySelectorAll(".sortable")) prepareSorting(table);
if ($("search")) prepareSearch();
if ($("timeline") || $("heat")) {
  unpack($("plotly")).then(() => {
    if ($("timeline")) drawTimeline();
    if ($("heat")) prepareHeat();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  });
}
