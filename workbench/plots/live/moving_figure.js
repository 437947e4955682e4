// A Plotly figure whose data and layout are the text of another model. See moving_figure.py.

const ASK_AGAIN_MS = 20000; // a busy kernel may take its time, and one that has ended does not answer
const shared = (globalThis.workbenchPlotly ??= { fromServer: null, fromKernel: null, text: null, askedMs: -Infinity });

// A file of our extension of JupyterLab, which the browser keeps: see plots/plotly_js.py.
async function fromServer() {
  const { fullLabextensionsUrl } = JSON.parse(document.getElementById("jupyter-config-data").textContent);
  const file = `${fullLabextensionsUrl}/sgd-workbench-figures/static/plotly-basic.js`;
  return (await import(new URL(file, location.href))).default;
}

// Any figure of the page receives the text. One of them asks its kernel.
async function fromKernel(model) {
  const hear = (content, buffers) => {
    if (content.plotly) shared.text ??= new Blob(buffers, { type: "text/javascript" });
  };
  model.on("msg:custom", hear);
  while (!shared.text) {
    if (Date.now() - shared.askedMs > ASK_AGAIN_MS) {
      shared.askedMs = Date.now();
      model.send({ want: "plotly" });
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  model.off("msg:custom", hear);
  shared.fromKernel ??= import(URL.createObjectURL(shared.text));
  return (await shared.fromKernel).default;
}

// plotly.js, once for the page.
function load(model) {
  shared.fromServer ??= fromServer();
  return shared.fromServer.catch(() => fromKernel(model));
}

// The colours of a dark theme of JupyterLab; a light one has those of the figure.
function themed(layout) {
  if (document.body.dataset.jpThemeLight !== "false") return layout;
  const of = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
  const [ink, ground, line] = ["--jp-content-font-color1", "--jp-layout-color0", "--jp-border-color2"].map(of);
  const axes = Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name));
  const drawn = (axis) => ({ ...axis, gridcolor: line, linecolor: line, zerolinecolor: line, color: ink });
  return {
    ...layout,
    ...Object.fromEntries(axes.map((name) => [name, drawn(layout[name])])),
    annotations: (layout.annotations ?? []).map((one) =>
      one.bgcolor ? one : { ...one, font: { ...one.font, color: ink } },
    ),
    paper_bgcolor: ground,
    plot_bgcolor: ground,
    font: { ...layout.font, color: ink },
  };
}

function asCsv(place) {
  const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const lines = ["curve,panel,x,y"];
  for (const trace of place._fullData.filter((one) => one.visible === true)) {
    const { name, legendgroup } = place.data[trace.index];
    for (let i = 0; i < (trace.x ?? []).length; i += 1) {
      const row = [name ?? legendgroup ?? "", trace.yaxis ?? "y", trace.x[i], trace.y[i]];
      lines.push(row.map((one) => cell(String(one))).join(","));
    }
  }
  return lines.join("\n") + "\n";
}

function saveCsv(place) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([asCsv(place)], { type: "text/csv" }));
  link.download = "figure.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}

function settings(Plotly) {
  const save = (format) => (place) => Plotly.downloadImage(place, { format, filename: "figure" });
  const button = (title, icon, click) => ({ name: title, title, icon, click });
  return {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["toImage"],
    modeBarButtonsToAdd: [
      button("Save as SVG", Plotly.Icons.camera, save("svg")),
      button("Save as PNG", Plotly.Icons["camera-retro"], save("png")),
      button("Save the data as CSV", Plotly.Icons.disk, saveCsv),
    ],
  };
}

async function render({ model, el }) {
  const source = await model.widget_manager.get_model(model.get("source"));
  const place = document.createElement("div");
  el.appendChild(place);
  // The rules of these classes are in still.py.
  const view = () => el.closest(".workbench-view")?.classList;
  const showState = () => {
    view()?.toggle("workbench-live", Boolean(place.data) && source.comm_live !== false);
    view()?.toggle("workbench-ended", source.comm_live === false);
  };
  source.on("comm_live_update", showState);
  const Plotly = await load(model);
  let drawing;
  const draw = () => {
    const { data, layout } = JSON.parse(source.get("value"));
    drawing = Plotly.react(place, data, themed(layout), settings(Plotly));
    showState(); // not only once: the first time, the view may not be on the page yet
  };
  const theme = new MutationObserver(draw);
  theme.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  const fit = new ResizeObserver(() => place.data && Plotly.Plots.resize(place));
  source.on("change:value", draw);
  fit.observe(el);
  draw();
  const tell = (shown) => source.comm_live !== false && model.send({ shown }); // how many places show the figure
  tell(1);
  return () => {
    tell(-1);
    source.off("change:value", draw);
    source.off("comm_live_update", showState);
    fit.disconnect();
    theme.disconnect();
    drawing.finally(() => Plotly.purge(place)); // earlier, Plotly would fail in the midst of a drawing
  };
}
export default { render };
