"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const read = (id) => document.getElementById(id).textContent;
const make = (tag, fields = {}) => Object.assign(document.createElement(tag), fields);

// Tables: sorted by a click on a heading, taken away as text or as a file.

function sort(table, column) {
  const heads = all("thead th", table);
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const numeric = all("tbody tr", table).some((row) => "value" in row.cells[column].dataset);
  const key = (row) => numeric ? Number(row.cells[column].dataset.value ?? NaN) : row.cells[column].textContent;
  const compare = (a, b) => numeric ? a - b : a.localeCompare(b, undefined, { numeric: true });
  const rows = all("tbody tr", table).map((row, at) => ({ row, at, key: key(row) }));
  const missing = (k) => numeric && Number.isNaN(k);
  rows.sort((a, b) => missing(a.key) - missing(b.key) || (down ? -1 : 1) * (missing(a.key) ? 0 : compare(a.key, b.key)) || a.at - b.at);
  table.tBodies[0].append(...rows.map((each) => each.row));
}

const cells = (table) => all("tr", table).map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
const quoted = (text) => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not on every page that is opened from a disk
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function save(text, name) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const holder of all(".table")) {
  const table = holder.querySelector("table");
  all("thead th", table).forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => sort(table, column)));
  const scroll = holder.querySelector(".scroll");
  scroll.addEventListener("scroll", () => scroll.classList.toggle("slid", scroll.scrollLeft > 2), { passive: true });
  holder.querySelector("[data-do=copy]").addEventListener("click", async (event) => {
    await copy(cells(table).map((row) => row.join("\t")).join("\n"));
    event.target.textContent = "Copied";
    setTimeout(() => { event.target.textContent = "Copy"; }, 1500);
  });
  holder.querySelector("[data-do=csv]").addEventListener("click", () => {
    const exact = holder.querySelector("script");
    const text = exact ? JSON.parse(exact.textContent) : cells(table).map((row) => row.map(quoted).join(",")).join("\n") + "\n";
    save(text, `${holder.dataset.name}.csv`);
  });
}

// Plots.

const dark = matchMedia("(prefers-color-scheme: dark)");
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const SHORT = { round: "rounds", exchanges: "exchanges", bytes_up: "bytes", oracle_calls: "oracle calls", seconds: "seconds" };
const hidden = new Set(); // names of lines that the reader has put away, in all plots

async function load() {
  const packed = Uint8Array.from(atob(read("plotly").trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = make("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function coloured(trace) {
  const { role } = trace.meta;
  if (role === "heatmap") return trace;
  const colour = variable(`--c${trace.meta.colour}`);
  if (role === "line") return { ...trace, line: { ...trace.line, color: colour } };
  if (role === "band") return { ...trace, fillcolor: faint(colour, dark.matches ? 0.22 : 0.16) };
  return { ...trace, marker: { color: colour }, error_y: { ...trace.error_y, color: variable("--ink") } };
}

// The points along another axis. A band goes with the line that follows it: up along its upper bounds, and back.
function along(data, axis) {
  const moved = data.map((trace) => trace.meta.role === "line" && axis ? { ...trace, x: trace.meta.along[axis] } : trace);
  return moved.map((trace, k) => {
    if (trace.meta.role !== "band" || !axis) return trace;
    const line = moved[k + 1];
    const whole = line.x.map((x, i) => [x, ...line.customdata[i]]).filter((point) => point.every((v) => v !== null));
    const back = [...whole].reverse();
    return { ...trace, x: [...whole, ...back].map((p) => p[0]), y: [...whole.map((p) => p[2]), ...back.map((p) => p[1])] };
  });
}

// Panels side by side as far as the width goes, with every axis and title placed accordingly.
function laid(layout, width, axis) {
  const [ink, soft, grid, paper] = ["--ink", "--soft", "--faint", "--raised"].map(variable);
  const { panels, kind } = layout.meta;
  const most = panels === 4 ? 2 : 3; // no panel alone in its row
  const columns = Math.max(1, Math.min(panels, most, Math.floor(width / 270)));
  const rows = Math.ceil(panels / columns);
  const narrow = width < 520;
  const margin = { l: narrow ? 54 : 62, r: kind === "heatmap" ? 20 : 12, t: panels > 1 || kind !== "line" ? 34 : 26, b: 48 };
  const each = panels === 1 ? (narrow ? 270 : 360) : 215;
  const between = 74;
  const inner = rows * each + (rows - 1) * between;
  const other = axis && axis !== layout.meta.x; // marks on the plot's own axis mean nothing on another
  const made = {
    ...layout,
    dragmode: narrow ? false : "zoom",
    height: inner + margin.t + margin.b,
    width,
    margin,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12.5, color: soft },
    hoverlabel: { bgcolor: paper, bordercolor: grid, font: { color: ink, size: 12.5 } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink, orientation: "h" },
    annotations: layout.annotations.filter((a) => !(other && a.name === "reference x"))
      .map((a) => ({ ...a, font: { size: 12.5, color: a.name?.startsWith("reference") ? soft : ink } })),
    shapes: layout.shapes.filter((s) => !(other && s.name === "x")).map((s) => ({ ...s, line: { ...s.line, color: soft } })),
  };
  const gap = columns > 1 ? 0.045 + (kind === "line" ? 0 : 0.03) : 0;
  const wide = (1 - gap * (columns - 1)) / columns;
  for (let k = 0; k < panels; k++) {
    const [row, column] = [Math.floor(k / columns), k % columns];
    const left = column * (wide + gap);
    const top = 1 - (row * (each + between)) / inner;
    const end = k ? String(k + 1) : "";
    const base = { gridcolor: grid, zerolinecolor: grid, linecolor: soft, automargin: false, ticks: "", zeroline: false };
    const [x, y] = [{ ...layout[`xaxis${end}`] }, layout[`yaxis${end}`]];
    if (axis) {
      x.title = { text: layout.meta.along[axis] };
      const bytes = axis === "bytes_up";
      Object.assign(x, { tickformat: bytes ? "~s" : undefined, ticksuffix: bytes ? "B" : undefined });
    }
    const shared = layout.meta.shared && column > 0;
    made[`xaxis${end}`] = { ...base, ...x, domain: [left, Math.min(1, left + wide)], showline: kind !== "heatmap",
      showgrid: kind === "line", nticks: narrow || columns > 2 ? 5 : 8, automargin: kind !== "line", title: { ...x.title, standoff: 8, font: { size: 12.5 } } };
    made[`yaxis${end}`] = { ...base, ...y, domain: [Math.max(0, top - each / inner), Math.min(1, top)],
      showgrid: kind !== "heatmap", nticks: kind === "heatmap" ? 40 : 6, showticklabels: !shared,
      automargin: kind === "heatmap", showline: kind !== "heatmap",
      title: column ? { text: "" } : { ...y.title, standoff: 6, font: { size: 12.5 } } };
  }
  return made;
}

function swatch(trace) {
  const colour = `var(--c${trace.meta.colour})`;
  if (trace.meta.role === "bar") return `<svg width="14" height="12"><rect width="14" height="12" rx="2" style="fill:${colour}"/></svg>`;
  const dashes = { dash: "7 3.5", dot: "2 3", dashdot: "7 3 2 3" }[trace.line.dash] || "none";
  return `<svg width="26" height="10"><path d="M0 5H26" style="stroke:${colour};stroke-width:2.4;stroke-dasharray:${dashes}"/></svg>`;
}

const places = [];

// A click hides a line in every plot, and a method's own name every line of the method; a double click leaves it alone.
function toggle(trace, alone) {
  const lines = places.flatMap((place) => place.lines);
  const chosen = (line) => line.name === trace.name || (trace.name === trace.meta.label && line.meta.label === trace.name);
  const show = hidden.has(trace.name);
  if (alone) {
    hidden.clear();
    for (const line of lines) if (!chosen(line)) hidden.add(line.name);
  } else {
    for (const line of lines.filter(chosen)) show ? hidden.delete(line.name) : hidden.add(line.name);
  }
  draw();
}

function prepare(element) {
  const figure = JSON.parse(read(element.dataset.figure));
  const { meta } = figure.layout;
  const lines = meta.legend ? figure.data.filter((trace) => trace.showlegend) : [];
  const place = { element, figure, lines, axis: meta.along ? meta.x : "" };
  if (meta.along) {
    const axes = element.querySelector(".axes");
    axes.append(make("span", { textContent: "along" }));
    for (const axis of Object.keys(meta.along)) {
      const button = make("button", { type: "button", textContent: SHORT[axis] });
      button.dataset.axis = axis;
      button.addEventListener("click", () => { place.axis = axis; drawOne(place); });
      axes.append(button);
    }
  }
  const legend = element.querySelector(".legend");
  for (const line of lines) {
    const button = make("button", { type: "button", innerHTML: `${swatch(line)}<span>${line.name}</span>` });
    button.dataset.name = line.name;
    button.title = "A click hides or shows it in all plots; a double click shows it alone.";
    button.addEventListener("click", () => toggle(line, false));
    button.addEventListener("dblclick", () => toggle(line, true));
    legend.append(button);
  }
  return place;
}

function drawOne(place) {
  const { element, figure, axis } = place;
  for (const button of all(".axes button", element)) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  for (const button of all(".legend button", element)) button.setAttribute("aria-pressed", !hidden.has(button.dataset.name));
  const data = along(figure.data, axis).map(coloured).map((trace) => ({ ...trace, showlegend: false, visible: !hidden.has(trace.name) }));
  const phone = element.clientWidth < 520; // a finger scrolls the page, it does not zoom
  const options = { displaylogo: false, responsive: false, displayModeBar: phone ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    toImageButtonOptions: { format: "svg", filename: element.dataset.name } };
  Plotly.react(element.querySelector(".drawn"), data, laid(figure.layout, element.clientWidth, axis), options);
}

const draw = () => places.forEach(drawOne);

// Where anything is missing (an old browser, no scripts) the static pictures stay.
if (document.getElementById("plotly")) load().then(() => {
  places.push(...all(".plot").map(prepare));
  draw();
  dark.addEventListener("change", draw);
  let width = innerWidth, wait;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; draw(); } }, 120);
  });
  for (const details of all("details")) details.addEventListener("toggle", draw); // a plot inside had no width
  document.documentElement.classList.add("ready");
}).catch((error) => {
  document.documentElement.classList.add("still");
  for (const extra of all(".axes, .legend")) extra.replaceChildren();
  console.warn("The interactive plots could not be drawn; the static ones are shown.", error);
});
