"use strict";
// Colours of the lines, in the order of the palette in plots.py; on dark paper they are lighter.
const LINES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b2528c", "#e69f00", "#56b4e9", "#4d4d4d"],
  dark: ["#4aa8e0", "#f08a4b", "#35c79b", "#dd8fc0", "#f0b840", "#9bd4f5", "#b8bec5"],
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const read = (id) => document.getElementById(id).textContent;
const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;

async function load() {
  const packed = Uint8Array.from(atob(read("plotly").trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function coloured(trace) {
  const colour = (dark.matches ? LINES.dark : LINES.light)[trace.meta.colour];
  const role = trace.meta.role;
  if (role === "line") return { ...trace, line: { ...trace.line, color: colour } };
  if (role === "band") return { ...trace, fillcolor: faint(colour, dark.matches ? 0.22 : 0.16) };
  if (role === "bar") return { ...trace, marker: { color: colour }, error_y: { ...trace.error_y, color: variable("--ink") } };
  return trace;
}

// Panels side by side as far as the width goes, with every axis and title placed accordingly.
function laid(layout, width) {
  const [ink, soft, grid, paper] = ["--ink", "--soft", "--faint", "--raised"].map(variable);
  const { panels, kind } = layout.meta;
  const columns = Math.max(1, Math.min(panels, 3, Math.floor(width / 270)));
  const rows = Math.ceil(panels / columns);
  const narrow = width < 520;
  const margin = { l: 62, r: kind === "heatmap" ? 20 : 12, t: 34, b: 48 };
  const each = panels === 1 ? (narrow ? 270 : 350) : 205;
  const between = 74;
  const inner = rows * each + (rows - 1) * between;
  // A legend's rows below the axes, estimated from its names.
  const names = layout.showlegend ? layout.meta.names : [];
  const lines = Math.ceil(names.reduce((sum, n) => sum + 7.2 * n.length + 52, 0) / Math.max(width - 30, 100));
  const legend = names.length ? lines * 22 + 14 : 0;
  margin.b += legend;
  const made = {
    ...layout,
    height: inner + margin.t + margin.b,
    width,
    margin,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12.5, color: soft },
    hoverlabel: { bgcolor: paper, bordercolor: grid, font: { color: ink, size: 12.5 } },
    legend: {
      orientation: "h", x: 0, xanchor: "left", xref: "paper", y: -(46 / inner), yanchor: "top",
      font: { color: ink },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink, orientation: "h" },
    annotations: layout.annotations.map((a) => ({ ...a, font: { size: 12.5, color: a.name === "reference" ? soft : ink } })),
    shapes: layout.shapes.map((s) => ({ ...s, line: { ...s.line, color: soft } })),
  };
  const gap = columns > 1 ? 0.045 + (kind === "line" ? 0 : 0.03) : 0;
  const wide = (1 - gap * (columns - 1)) / columns;
  for (let k = 0; k < panels; k++) {
    const [row, column] = [Math.floor(k / columns), k % columns];
    const left = column * (wide + gap);
    const top = 1 - (row * (each + between)) / inner;
    const end = k ? String(k + 1) : "";
    const base = { gridcolor: grid, zerolinecolor: grid, linecolor: soft, automargin: false, ticks: "", zeroline: false };
    const [x, y] = [layout[`xaxis${end}`], layout[`yaxis${end}`]];
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

function draw() {
  for (const place of document.querySelectorAll(".plot")) {
    const figure = JSON.parse(read(place.dataset.figure));
    figure.layout.meta.names = figure.data.filter((t) => t.showlegend).map((t) => t.name);
    const target = place.querySelector(".drawn");
    const options = { displaylogo: false, responsive: false, displayModeBar: "hover",
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
      toImageButtonOptions: { format: "svg", filename: place.dataset.name } };
    Plotly.react(target, figure.data.map(coloured), laid(figure.layout, place.clientWidth), options);
  }
}

// Where anything is missing (an old browser, no scripts) the static pictures stay.
load().then(() => {
  draw();
  dark.addEventListener("change", draw);
  let width = innerWidth, wait;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; draw(); } }, 120);
  });
}).catch((error) => {
  document.documentElement.classList.remove("js");
  console.warn("The interactive plots could not be drawn; the static ones are shown.", error);
});
