// The colours of finished figures in a dark theme of JupyterLab, and the library of live ones. An extension without a build.
//
// A finished figure is Plotly's data, which a notebook stores with the colours of plots/style.py. JupyterLab draws it
// with Plotly's own extension. So this changes only what the page shows: a rule for each neutral colour of style.py.
// Live figures choose their colours themselves (plots/live/moving_figure.js).

const OURS = `body[data-jp-theme-light="false"] .js-plotly-plot:has(text[style*="fill: rgb(36, 41, 47)"])`;
const STYLE = `
${OURS} .main-svg { background: transparent !important; }
${OURS} .bglayer .bg, ${OURS} .legend > .bg { fill: transparent !important; }
${OURS} [style*="fill: rgb(36, 41, 47)"] { fill: var(--jp-content-font-color1) !important; }
${OURS} [style*="fill: rgb(106, 115, 125)"] { fill: var(--jp-content-font-color2) !important; }
${OURS} [style*="stroke: rgb(230, 232, 235)"] { stroke: var(--jp-border-color2) !important; }
${OURS} path.js-line[style*="stroke: rgb(0, 0, 0)"] { stroke: var(--jp-content-font-color1) !important; }
`;

function addStyle() {
  const style = document.createElement("style");
  style.textContent = STYLE;
  document.head.appendChild(style);
}

// The library of live figures (plots/live/moving_figure.js) is read before the first one, when the page has nothing to do.
function preload() {
  const { fullLabextensionsUrl } = JSON.parse(document.getElementById("jupyter-config-data").textContent);
  const link = document.createElement("link");
  link.rel = "modulepreload";
  link.href = new URL(`${fullLabextensionsUrl}/sgd-workbench-figures/static/plotly-basic.js`, location.href);
  document.head.appendChild(link);
}

function activate() {
  addStyle();
  (globalThis.requestIdleCallback ?? setTimeout)(preload);
}

const plugin = { id: "sgd-workbench-figures:plugin", autoStart: true, activate };
(globalThis._JUPYTERLAB ??= {})["sgd-workbench-figures"] = {
  init: () => {},
  get: async () => () => ({ __esModule: true, default: plugin }),
};
