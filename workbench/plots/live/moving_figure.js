// A Plotly figure whose data and layout are the text of another model. See moving_figure.py.

async function textFromServer() {
  const page = document.getElementById("jupyter-config-data");
  const { baseUrl } = JSON.parse(page.textContent);
  const answer = await fetch(new URL(`${baseUrl}workbench/api/plotly.js`, location.href));
  if (!answer.ok) throw new Error(`${answer.status}: the server has no extension of the workbench`);
  return answer.text();
}

function textFromKernel(model) {
  return new Promise((resolve) => {
    const hear = (content, buffers) => {
      if (!content.plotly) return;
      model.off("msg:custom", hear);
      resolve(new TextDecoder().decode(buffers[0]));
    };
    model.on("msg:custom", hear);
    model.send({ want: "plotly" });
  });
}

// plotly.js as a module of its own, apart from other copies on the page
async function load(model) {
  if (globalThis.workbenchPlotly) return globalThis.workbenchPlotly;
  globalThis.workbenchPlotlyText ??= textFromServer();
  const text = await globalThis.workbenchPlotlyText.catch(() => textFromKernel(model));
  const module = new Blob(
    [
      "export default (function () { const module = { exports: {} }, exports = module.exports, define = undefined;\n",
      text,
      "\nreturn module.exports && module.exports.react ? module.exports : globalThis.Plotly; }).call(globalThis);",
    ],
    { type: "text/javascript" },
  );
  const url = URL.createObjectURL(module);
  globalThis.workbenchPlotly ??= (await import(url)).default;
  URL.revokeObjectURL(url);
  return globalThis.workbenchPlotly;
}

async function render({ model, el }) {
  const source = await model.widget_manager.get_model(model.get("source"));
  const place = document.createElement("div");
  place.style.minHeight = "450px"; // so that the page does not jump
  el.appendChild(place);
  const Plotly = await load(model);
  place.style.minHeight = "";
  const draw = () => {
    const { data, layout } = JSON.parse(source.get("value"));
    Plotly.react(place, data, layout, { responsive: true, displaylogo: false });
  };
  const fit = new ResizeObserver(() => place.data && Plotly.Plots.resize(place));
  source.on("change:value", draw);
  fit.observe(el);
  draw();
  return () => {
    source.off("change:value", draw);
    fit.disconnect();
    Plotly.purge(place);
  };
}
export default { render };
