// The interactive timeline: pages, notebooks and the panel of JupyterLab share this module. payload.py makes its data.
//
//   const viewer = mount(element, { load: ({ first, last, critical }) => ... });
//   viewer.show(content);
//
// `load` is optional. It asks for other steps, for critical paths, or with {} for the newest steps.
// Times are seconds, places are pixels. Names of runs and lanes are shown as text, never as HTML.

const GUTTER = 148; // width of the names of ranks and lanes
const LANE_AT = 66; // where names of lanes begin
const RULER = 24; // height of the time axis
const HEAD = 38; // height of a run's title, with the numbers of its steps
const ROW = 19; // height of a lane
const THIN_ROW = 9; // height of each row of a lane with concurrent spans
const MAX_TALLER = 1.7; // factor of these heights if there is room
const PATH_ABOVE = 3; // of the end of a row: a critical path runs below the names in its bars
const GAP = 5; // between ranks
const [MIN_FOLDED, MAX_FOLDED] = [11, 20]; // height of a folded rank
const MAX_LINKS = 1500; // with more messages in view, none is drawn
const MIN_WINDOW_S = 2e-8;
const DRAG = 4; // with less movement, it is a click
const CRITICAL_SHARE = 0.9; // of the critical path in view that unfolded ranks carry
const FOLLOWED_STEPS = 5; // newest steps in view of a run that trains
const PERFETTO = "https://ui.perfetto.dev";
const PONG_MS = 15000; // how long Perfetto may take to load
const FONT = "Inter, 'Segoe UI', Helvetica, Arial, sans-serif";

const KEYS = [
  ["w  s  or  +  -", "zoom in, zoom out, at the pointer"],
  ["a  d  or  ← →", "move left, right"],
  ["↑ ↓  and  Enter", "choose a rank; fold or unfold it"],
  ["u", "unfold all ranks, or fold all"],
  ["l", "messages from send to receive: on, off"],
  ["c", "critical path: on, off"],
  ["r", "unfold the ranks that carry 90 % of the critical path in view, and fold the others"],
  ["0", "the window at first"],
  ["f", "all steps"],
  ["n", "follow the newest steps of a run that trains"],
  ["Esc", "no selection"],
  ["?", "this list"],
  ["Ctrl and wheel", "zoom; Shift and wheel: move"],
  ["drag", "move; on the time axis: zoom into the range"],
  ["click", "a span: its messages or its collective; a rank's name: fold or unfold; a kind: hide it"],
  ["double click", "zoom to the span"],
];

const STYLE = `
.wb-Timeline { --ink: #24292f; --muted: #6a737d; --ground: #fff; --line: #d8dce0; --soft: #f3f4f6; --accent: #0072b2;
  display: flex; flex-direction: column; height: 100%; min-height: 0; position: relative; outline: none;
  box-sizing: border-box;
  background: var(--ground); color: var(--ink); font: 13px/1.4 ${FONT}; }
.wb-Timeline[data-dark] { --ink: #e6e8eb; --muted: #9aa4af; --ground: #16191d; --line: #363d45; --soft: #22272d;
  --accent: #56b4e9; }
.wb-Timeline *, .wb-Timeline { box-sizing: border-box; }
.wb-Timeline-bar { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; padding: 6px 8px;
  border-bottom: 1px solid var(--line); }
.wb-Timeline button { font: inherit; font-size: 12px; color: inherit; background: var(--soft);
  border: 1px solid var(--line); border-radius: 4px;
  padding: 1px 8px; cursor: pointer; white-space: nowrap; }
.wb-Timeline button:hover { border-color: var(--accent); }
.wb-Timeline button[aria-pressed=true] { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); }
.wb-Timeline button:focus-visible, .wb-Timeline input:focus-visible { outline: 2px solid var(--accent);
  outline-offset: 1px; }
.wb-Timeline label { font-size: 12px; color: var(--muted); white-space: nowrap; }
.wb-Timeline input { font: inherit; font-size: 12px; width: 5.5em; color: inherit; background: var(--ground);
  border: 1px solid var(--line);
  border-radius: 4px; padding: 0 4px; }
.wb-Timeline-kinds { display: flex; flex-wrap: wrap; gap: 2px 4px; padding: 4px 8px; }
.wb-Timeline .wb-Timeline-kinds button { border-color: transparent; box-shadow: none; background: none;
  padding: 0 5px; }
.wb-Timeline .wb-Timeline-kinds button:hover { border-color: var(--line); }
.wb-Timeline-kinds button[aria-pressed=false] { opacity: 0.45; text-decoration: line-through; }
.wb-Timeline-kinds i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 2px; }
.wb-Timeline-spacer { flex: 1; }
.wb-Timeline-rows { flex: 1 1 auto; min-height: 120px; overflow-y: auto; overflow-x: hidden; position: relative;
  border-top: 1px solid var(--line); }
.wb-Timeline-rows canvas { position: sticky; top: 0; display: block; cursor: default; touch-action: pan-y; }
.wb-Timeline:focus-visible .wb-Timeline-rows { box-shadow: inset 0 0 0 2px var(--accent); }
.wb-Timeline-status { padding: 4px 8px; border-top: 1px solid var(--line); font-size: 12px; min-height: 27px;
  max-height: 5em; overflow-y: auto; }
.wb-Timeline-status b { font-weight: 600; }
.wb-Timeline-status span { color: var(--muted); }
.wb-Timeline-tip { position: absolute; z-index: 2; pointer-events: none; background: var(--ground);
  border: 1px solid var(--line); border-radius: 4px;
  box-shadow: 0 2px 8px #0003; padding: 3px 8px; font-size: 12px; white-space: pre-line; max-width: 340px; }
.wb-Timeline-table { flex: 0 0 auto; max-height: 42%; overflow: auto; border-top: 1px solid var(--line);
  padding: 4px 8px 6px; font-size: 12px; }
.wb-Timeline-table table { border-collapse: collapse; }
.wb-Timeline-table caption { text-align: left; font-weight: 600; padding-bottom: 2px; white-space: nowrap; }
.wb-Timeline-table th, .wb-Timeline-table td { padding: 1px 14px 1px 0; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.wb-Timeline-table th { color: var(--muted); font-weight: 500; }
.wb-Timeline-table th:first-child, .wb-Timeline-table td:first-child { text-align: left; }
.wb-Timeline-table p { margin: 3px 0 0; color: var(--muted); }
.wb-Timeline-help { position: absolute; z-index: 3; inset: 0; display: flex; align-items: center;
  justify-content: center; background: #0006; }
.wb-Timeline-help[hidden], .wb-Timeline-tip[hidden], .wb-Timeline-table[hidden] { display: none; }
.wb-Timeline-help dl { display: grid; grid-template-columns: auto 1fr; gap: 2px 16px; margin: 0; max-height: 95%;
  overflow: auto; background: var(--ground);
  border: 1px solid var(--line); border-radius: 6px; padding: 12px 18px; }
.wb-Timeline-help dt { font-weight: 600; white-space: pre; }
.wb-Timeline-help dd { margin: 0; }
`;

// ---------------------------------------------------------------- numbers and words

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const threeDigits = (value) => (value >= 999.5 ? value.toFixed(0) : Number(value.toPrecision(3)).toString());

function seconds(value) {
  for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (Math.abs(value) >= 0.9995 * factor) return `${threeDigits(value / factor)} ${unit}`;
  }
  return value ? `${threeDigits(value / 1e-9)} ns` : "0 s";
}

function bytes(value) {
  for (const [factor, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= 0.9995 * factor) return `${threeDigits(value / factor)} ${unit}`;
  }
  return `${value} B`;
}

function isLight(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue >= 140;
}

function isDark() {
  for (const page of [globalThis, globalThis.parent]) {
    try {
      const { dataset, classList } = page.document.body;
      if (dataset.jpThemeLight) return dataset.jpThemeLight === "false";
      if (classList.contains("vscode-dark")) return true;
    } catch {
      // a page of another origin
    }
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// The first place in an ascending array whose value is greater.
function firstAbove(values, value) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

// ---------------------------------------------------------------- a run's data

const TYPES = { row: Uint16Array, kind: Uint8Array, start: Float64Array, end: Float64Array, bytes: Float64Array };

async function unpack(columns, types) {
  const found = await Promise.all(
    Object.entries(columns).map(async ([name, text]) => {
      const packed = atob(text);
      const raw = new Uint8Array(packed.length);
      for (let at = 0; at < packed.length; at += 1) raw[at] = packed.charCodeAt(at);
      const plain = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
      return [name, new (types[name] ?? Int32Array)(await new Response(plain).arrayBuffer())];
    }),
  );
  return Object.fromEntries(found);
}

// Spans in the order of their starts, with the latest end up to each: so a window finds its first span by bisection.
function sequence(spans, ends) {
  const reach = new Float64Array(spans.length);
  let latest = -Infinity;
  spans.forEach((span, at) => {
    latest = Math.max(latest, ends[span]);
    reach[at] = latest;
  });
  return { spans, reach };
}

class Run {
  static async read(data, number) {
    const columns = await unpack(data.columns, TYPES);
    const path = data.path ? await unpack(data.path, { start: Float64Array, end: Float64Array }) : null;
    return new Run(data, columns, path, number);
  }

  constructor(data, columns, path, number) {
    Object.assign(this, data, { columns, path, number, shift: 0, size: columns.start.length });
    const { start, end, row } = columns;
    const ofRow = this.rows.map(() => []);
    for (let span = 0; span < this.size; span += 1) ofRow[row[span]].push(span); // the table is sorted by start
    this.sequences = ofRow.map((spans) => sequence(spans, end));
    this.center = new Float64Array(this.rows.length); // of each row, from the top
    this.pathAt = new Float64Array(this.rows.length); // where a critical path runs through it
    this.ranks = [];
    this.rows.forEach(({ rank }, place) => {
      if (this.ranks.at(-1)?.rank !== rank) this.ranks.push({ rank, rows: [], run: this });
      this.ranks.at(-1).rows.push(place);
    });
    const order = (one, other) => start[one] - start[other] || end[other] - end[one] || one - other;
    for (const rank of this.ranks) {
      rank.tracks = [true, false].map((computes) => {
        const rows = rank.rows.filter((place) => this.rows[place].computes === computes);
        const spans = rows.flatMap((place) => ofRow[place]);
        return { rows, ...sequence(rows.length > 1 ? spans.sort(order) : spans, end) };
      });
    }
    this.partner = new Int32Array(this.size).fill(-1);
    columns.sent.forEach((sent, at) => {
      this.partner[sent] = columns.received[at];
      this.partner[columns.received[at]] = sent;
    });
  }

  // The calls of a collective, in the order of their ranks; a message's two ends; or the span alone.
  related(span) {
    const { group } = this.columns;
    if (this.partner[span] >= 0) return [span, this.partner[span]];
    if (group[span] < 0) return [span];
    const found = [];
    for (let other = 0; other < this.size; other += 1) if (group[other] === group[span]) found.push(other);
    return found;
  }

  rankOf(span) {
    return this.rows[this.columns.row[span]].rank;
  }

  // The begin of a step; without it, of the first.
  beginOf(step) {
    return this.begins[Math.max(0, this.steps.indexOf(step))] ?? 0;
  }
}

// The fewest ranks that carry `CRITICAL_SHARE` of a critical path within a time.
function criticalRanks({ start, end, rank }, begin, stop) {
  const lengths = new Map();
  let left = 0;
  for (let at = 0; at < start.length; at += 1) {
    const length = Math.max(0, Math.min(end[at], stop) - Math.max(start[at], begin));
    lengths.set(rank[at], (lengths.get(rank[at]) ?? 0) + length);
    left += CRITICAL_SHARE * length;
  }
  const found = new Set();
  for (const [one, length] of [...lengths].sort(([, a], [, b]) => b - a)) {
    if (left <= 0) break;
    found.add(one);
    left -= length;
  }
  return found;
}

// ---------------------------------------------------------------- Perfetto

// The events of runs, as trace/chrome.py writes them: a rank is a process, a row a thread, a message an arrow.
export function chromeTrace(runs, kinds) {
  const events = [];
  const ticks = (at_s) => Math.round(at_s * 1e9) / 1e3;
  let flow = 0;
  for (const run of runs) {
    const { row, kind, start, end, step, bucket, bytes: sizes, peer, sent, received } = run.columns;
    const process = (rank) => 1 + rank + 100000 * run.number;
    const origin = start.reduce((first, at) => Math.min(first, at), Infinity);
    const about = (name, pid, tid, args) => events.push({ ph: "M", name, pid, tid, args });
    for (const { rank, rows } of run.ranks) {
      about("process_name", process(rank), 1, { name: runs.length > 1 ? `${run.name}: rank ${rank}` : `rank ${rank}` });
      about("process_sort_index", process(rank), 1, { sort_index: process(rank) });
      rows.forEach((place, at) => {
        const { lane, number } = run.rows[place];
        about("thread_name", process(rank), 1 + at, { name: lane + (number ? ` (${number + 1})` : ""), lane });
        about("thread_sort_index", process(rank), 1 + at, { sort_index: 1 + at });
      });
    }
    const thread = new Int32Array(run.rows.length);
    for (const { rows } of run.ranks) rows.forEach((place, at) => (thread[place] = 1 + at));
    const where = (span) => ({ pid: process(run.rankOf(span)), tid: thread[row[span]] });
    for (let span = 0; span < run.size; span += 1) {
      const args = { step: step[span] };
      if (bucket[span] >= 0) args.bucket = bucket[span];
      if (peer[span] >= 0) args.peer = peer[span];
      if (sizes[span]) args.bytes = sizes[span];
      const [begin, stop, cat] = [ticks(start[span] - origin), ticks(end[span] - origin), kinds[kind[span]]];
      const name = bucket[span] >= 0 ? `${cat} ${bucket[span]}` : cat;
      events.push({ ph: "X", name, cat, ...where(span), ts: begin, dur: Math.round((stop - begin) * 1e3) / 1e3, args });
    }
    sent.forEach((send, at) => {
      const receive = received[at];
      const [begin, stop] = [ticks(start[send] - origin), ticks(end[receive] - origin - 1e-9)];
      if (ticks(end[send] - origin) - begin < 0.002 || stop < Math.max(begin, ticks(start[receive] - origin))) return;
      const arrow = { name: "message", cat: "message", id: flow };
      flow += 1;
      events.push({ ph: "s", ...arrow, ...where(send), ts: begin });
      events.push({ ph: "f", ...arrow, ...where(receive), ts: stop, bp: "e" });
    });
  }
  return { displayTimeUnit: "ms", traceEvents: events };
}

function download(blob, name) {
  const href = URL.createObjectURL(blob);
  const link = element("a", { href, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}

// Give a trace to Perfetto in a new tab. It answers PONG once it can be given one. Resolves to whether it answered.
function openInPerfetto(text, title, origin) {
  const tab = window.open(origin);
  if (!tab) return Promise.resolve(false);
  return new Promise((resolve) => {
    const end = (answered) => {
      clearInterval(ping);
      clearTimeout(patience);
      window.removeEventListener("message", hear);
      resolve(answered);
    };
    const hear = (event) => {
      if (event.source !== tab || event.origin !== origin || event.data !== "PONG") return;
      const { buffer } = new TextEncoder().encode(text);
      tab.postMessage({ perfetto: { buffer, title, fileName: "trace.json" } }, origin, [buffer]);
      end(true);
    };
    window.addEventListener("message", hear);
    const ping = setInterval(() => tab.postMessage("PING", origin), 100);
    const patience = setTimeout(() => end(false), PONG_MS);
  });
}

// ---------------------------------------------------------------- the viewer

class Viewer {
  constructor(place, options) {
    this.options = options;
    this.mountedMs = performance.now();
    this.runs = [];
    this.items = []; // what is drawn, from top to bottom
    this.labels = []; // the texts of the last drawing, with their places
    this.view = { begin: 0, end: 1 };
    this.open = new Map(); // ranks that the user folded or unfolded
    this.hidden = new Set(); // kinds
    Object.assign(this, { links: null, critical: false, selected: null, hovered: null, focus: -1 });
    Object.assign(this, { moved: false, isLive: false, follows: true, pending: null, left: false, showing: 0 });
    Object.assign(this, { pointer: null, drag: null, frame: 0, colors: {}, message: "", hint: "" });
    this.build(place);
    this.theme();
    this.watch();
  }

  build(place) {
    const button = (text, title, click) => element("button", { type: "button", title, onclick: click }, text);
    this.buttons = {
      fold: button("Unfold all", "u", () => this.foldAll()),
      links: button("Messages", "Arrows from send to receive (l)", () => this.toggle("links")),
      critical: button("Critical path", "The chain of spans that ends each step (c)", () => this.toggle("critical")),
      ranks: button("Critical ranks", "Unfold the ranks of the path in view, fold others (r)", () => this.foldOthers()),
      first: button("Reset", "The window at first (0)", () => this.home()),
      all: button("All steps", "f", () => this.whole()),
      follow: button("Follow", "Follow the newest steps (n)", () => this.resume()),
      perfetto: button("Open in Perfetto", "Give these spans to ui.perfetto.dev in a new tab", () => this.perfetto()),
      save: button("Save trace", "Save these spans as a file for ui.perfetto.dev", () => this.save()),
      picture: button("Save PNG", "Save the rows and spans in view as a picture", () => this.savePicture()),
      help: button("?", "Keys", () => this.help()),
    };
    const number = (label, onchange) => element("input", { type: "number", min: 0, "aria-label": label, onchange });
    this.align = number("Align the runs at step", () => this.alignAt(Number(this.align.value)));
    this.alignLabel = element("label", { hidden: true }, "aligned at step ", this.align);
    this.first = number("First step", () => this.loadSteps());
    this.last = number("Last step", () => this.loadSteps());
    this.range = element("label", { hidden: true }, "steps ", this.first, " to ", this.last);
    const { fold, links, critical, ranks, first, all, follow, perfetto, save, picture, help } = this.buttons;
    this.bar = element("div", { class: "wb-Timeline-bar", role: "toolbar", "aria-label": "Timeline" });
    this.bar.append(fold, links, critical, ranks, first, all, follow, this.range, this.alignLabel);
    this.bar.append(element("span", { class: "wb-Timeline-spacer" }), perfetto, save, picture, help);
    this.legend = element("div", { class: "wb-Timeline-kinds", role: "group", "aria-label": "Kinds of spans" });
    this.canvas = element("canvas");
    this.inner = element("div", {}, this.canvas);
    this.scroller = element("div", { class: "wb-Timeline-rows" }, this.inner);
    this.status = element("div", { class: "wb-Timeline-status", role: "status" });
    this.table = element("div", { class: "wb-Timeline-table", hidden: true });
    this.tip = element("div", { class: "wb-Timeline-tip", hidden: true });
    const list = element("dl", { role: "dialog", "aria-label": "Keys" });
    for (const [keys, effect] of KEYS) list.append(element("dt", {}, keys), element("dd", {}, effect));
    this.keys = element("div", { class: "wb-Timeline-help", hidden: true, onclick: () => this.help() }, list);
    // Lumino looks for this attribute: the keys of JupyterLab (d d deletes a cell) are not for this element.
    const apart = { tabindex: 0, "data-lm-suppress-shortcuts": "true" };
    const named = { class: "wb-Timeline", role: "group", "aria-label": "Timeline: press ? for its keys" };
    this.root = element("div", { ...named, ...apart }, element("style", {}, STYLE), this.bar, this.legend);
    this.root.append(this.scroller, this.status, this.table, this.tip, this.keys);
    place.replaceChildren(this.root);
  }

  watch() {
    const { canvas, scroller, root } = this;
    const draw = () => this.draw();
    this.ended = new AbortController();
    const until = { signal: this.ended.signal };
    root.addEventListener("keydown", (event) => this.key(event), until);
    scroller.addEventListener("scroll", draw, until);
    scroller.addEventListener("wheel", (event) => this.wheel(event), { ...until, passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event), until);
    canvas.addEventListener("pointermove", (event) => this.move(event), until);
    canvas.addEventListener("pointerup", (event) => this.release(event), until);
    canvas.addEventListener("pointercancel", () => (this.drag = null), until);
    canvas.addEventListener("pointerleave", () => this.hover(null), until);
    canvas.addEventListener("dblclick", (event) => this.zoomTo(this.at(event)), until);
    const resized = new ResizeObserver(() => {
      this.lay();
      draw();
    });
    resized.observe(scroller);
    const themed = new MutationObserver(() => this.theme());
    for (const page of [globalThis, globalThis.parent]) {
      try {
        themed.observe(page.document.body, { attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
      } catch {
        // a page of another origin
      }
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.theme(), until);
    this.ended.signal.addEventListener("abort", () => {
      resized.disconnect();
      themed.disconnect();
      cancelAnimationFrame(this.frame);
    });
  }

  dispose() {
    this.ended.abort();
    this.root.remove();
  }

  theme() {
    this.root.toggleAttribute("data-dark", isDark());
    this.draw();
  }

  // Only when it paints: a notebook may build the viewer before its place is in the page, where it has no style yet.
  readColors() {
    const style = getComputedStyle(this.root);
    for (const name of ["ink", "muted", "ground", "line", "soft", "accent"]) {
      this.colors[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  // ---- data

  // Show what payload.py made. Of a run that trains, only if the user has not moved away from its newest steps.
  async show(content) {
    if (this.runs.length && this.isLive && !this.follows) {
      this.pending = content;
      this.update();
      return;
    }
    this.showing += 1;
    const mine = this.showing;
    const runs = await Promise.all(content.runs.map((run, number) => Run.read(run, number)));
    if (mine !== this.showing || this.ended.signal.aborted) return; // a later one was faster
    if (this.isLive && !this.follows) {
      this.pending = content; // the user moved meanwhile
      return;
    }
    const wasLive = this.isLive;
    Object.assign(this, { content, runs, pending: null, selected: null, hovered: null, isLive: content.live });
    this.links ??= runs.reduce((sum, run) => sum + run.columns.sent.length, 0) <= content.clearLinks;
    const first = runs[0].steps.findIndex((_, at) => runs[0].begins[at] >= runs[0].window[0]);
    const common = runs[0].steps.find((step, at) => at >= first && runs.every((run) => run.steps.includes(step)));
    this.alignAt(common ?? runs[0].steps[Math.max(first, 0)], false);
    this.fill();
    this.lay();
    if (!(wasLive && !content.live && this.moved)) this.home();
    this.update();
    this.draw();
  }

  fill() {
    const { content, runs } = this;
    const there = new Set();
    for (const { columns } of runs) for (const kind of columns.kind) there.add(kind);
    const names = content.kinds.map((name) => name.replaceAll("_", "-"));
    this.kindNames = names;
    this.inks = content.colors.map((color) => (isLight(color) ? "#000" : "#fff"));
    this.legend.replaceChildren(
      ...[...there].sort((one, other) => one - other).map((kind) => {
        const toggle = () => {
          if (!this.hidden.delete(kind)) this.hidden.add(kind);
          button.setAttribute("aria-pressed", String(!this.hidden.has(kind)));
          this.draw();
        };
        const patch = element("i", { style: `background: ${content.colors[kind]}` });
        const shown = { "aria-pressed": String(!this.hidden.has(kind)), title: "Show or hide" };
        const button = element("button", { type: "button", ...shown, onclick: toggle }, patch, names[kind]);
        return button;
      }),
    );
    this.table.hidden = !content.difference;
    if (content.difference) {
      const { caption, titles, cells, notes } = content.difference;
      const row = (line, cell) => element("tr", {}, ...line.map((text) => element(cell, {}, text)));
      const body = element("tbody", {}, ...cells.map((line) => row(line, "td")));
      const head = element("thead", {}, row(titles, "th"));
      const table = element("table", {}, element("caption", {}, caption), head, body);
      this.table.replaceChildren(table, ...notes.map((note) => element("p", {}, note)));
    }
    this.alignLabel.hidden = runs.length < 2;
    this.range.hidden = !this.options.load || !runs[0].traced.length;
    if (document.activeElement !== this.first && document.activeElement !== this.last) {
      this.first.value = runs[0].steps[0] ?? 0;
      this.last.value = runs[0].steps.at(-1) ?? 0;
    }
    this.range.title = runs[0].traced.length ? `The trace has steps ${runs[0].traced[0]} to ${runs[0].traced[1]}` : "";
  }

  loadSteps() {
    const [first, last] = [Number(this.first.value), Number(this.last.value)];
    if (!(first <= last)) return this.say(`Steps ${first} to ${last}: give the smaller number first`);
    Object.assign(this, { follows: false, left: this.left || this.isLive, isLive: false, moved: false });
    return this.options.load({ first, last: last + 1 });
  }

  alignAt(step, draw = true) {
    for (const run of this.runs) run.shift = this.runs.length > 1 ? run.beginOf(step) : 0;
    this.align.value = step;
    if (!draw) return;
    this.home();
    const missing = this.runs.filter((run) => !run.steps.includes(step)).map((run) => run.name);
    this.say(missing.length ? `Step ${step} is not shown of ${missing.join(", ")}: aligned at its first step` : "");
  }

  // ---- windows

  get extent() {
    const begin = Math.min(...this.runs.map((run) => -run.shift));
    return { begin, end: Math.max(...this.runs.map((run) => run.length - run.shift), begin + MIN_WINDOW_S) };
  }

  window(begin, end, byUser = true) {
    const { extent } = this;
    const length = Math.min(Math.max(end - begin, MIN_WINDOW_S), extent.end - extent.begin);
    const first = Math.min(Math.max(begin, extent.begin), extent.end - length);
    this.view = { begin: first, end: first + length };
    if (byUser) {
      this.moved = true;
      if (this.isLive && this.follows) {
        this.follows = false;
        this.update();
      }
    }
    this.hover(null);
    this.draw();
  }

  home() {
    if (!this.runs.length) return;
    const [{ begins, length, window }] = this.runs;
    if (this.runs.length > 1) {
      const lengths = this.runs.map((run) => run.window[1] - run.window[0]);
      this.window(0, Math.max(...lengths), false);
    } else if (this.isLive) this.window(begins[Math.max(0, begins.length - FOLLOWED_STEPS)], length, false);
    else this.window(...window, false);
    this.moved = false;
  }

  whole() {
    const { begin, end } = this.extent;
    this.window(begin, end);
  }

  resume() {
    Object.assign(this, { follows: true, moved: false });
    if (this.left) {
      this.left = false; // the user had asked for other steps
      void this.options.load({});
    } else if (this.pending) void this.show(this.pending);
    else this.home();
    this.update();
  }

  zoom(factor) {
    const { begin, end } = this.view;
    const middle = this.pointer && this.pointer.x > GUTTER ? this.timeAt(this.pointer.x) : (begin + end) / 2;
    this.window(middle - (middle - begin) * factor, middle + (end - middle) * factor);
  }

  pan(share) {
    const by = (this.view.end - this.view.begin) * share;
    this.window(this.view.begin + by, this.view.end + by);
  }

  zoomTo(found) {
    if (!found || found.span === undefined) return;
    const { start, end } = found.run.columns;
    const [begin, stop] = [start[found.span] - found.run.shift, end[found.span] - found.run.shift];
    const margin = Math.max((stop - begin) * 0.15, MIN_WINDOW_S);
    this.window(begin - margin, stop + margin);
  }

  // ---- rows

  isOpen({ run, rank }) {
    return this.open.get(`${run.number}:${rank}`) ?? run.ranks.length < this.content.foldedFrom;
  }

  lay() {
    if (!this.runs.length) return;
    const ranks = this.runs.reduce((sum, run) => sum + run.ranks.length, 0);
    const room = this.scroller.clientHeight - RULER - HEAD * this.runs.length - 8;
    const folded = Math.min(Math.max(Math.floor(room / ranks) - 1, MIN_FOLDED), MAX_FOLDED);
    const heightOf = (rank) => (this.isOpen(rank) ? this.heightOf(rank) + GAP : folded + 1);
    const needed = this.everyRank.reduce((sum, rank) => sum + heightOf(rank), 0);
    const taller = this.options.fit ? 1 : Math.min(Math.max(room / needed, 1), MAX_TALLER); // few ranks fill the room
    this.items = [];
    let y = 0;
    const add = (item, height) => {
      this.items.push({ ...item, y, height });
      y += height;
    };
    for (const run of this.runs) {
      add({ type: "head", run }, HEAD);
      for (const rank of run.ranks) {
        if (this.isOpen(rank)) {
          rank.rows.forEach((place, at) => {
            const height = Math.round(taller * (run.rows[place].thin ? THIN_ROW : ROW));
            run.center[place] = y + height / 2;
            run.pathAt[place] = y + height - PATH_ABOVE;
            add({ type: "row", run, rank, place, leads: at === 0 }, height);
          });
          y += GAP;
        } else {
          rank.tracks.forEach(({ rows }, track) => {
            for (const place of rows) run.center[place] = run.pathAt[place] = y + folded * (track ? 0.72 : 0.26);
          });
          add({ type: "rank", run, rank, leads: true }, folded);
          y += 1;
        }
      }
      y += 4;
    }
    this.contentHeight = y;
    if (this.options.fit) this.scroller.style.height = `${Math.min(RULER + y + 6, this.options.fit)}px`;
    this.inner.style.height = `${Math.max(RULER + y, this.scroller.clientHeight)}px`;
  }

  heightOf({ run, rows }) {
    return rows.reduce((sum, place) => sum + (run.rows[place].thin ? THIN_ROW : ROW), 0);
  }

  fold(rank) {
    this.open.set(`${rank.run.number}:${rank.rank}`, !this.isOpen(rank));
    this.lay();
    this.update();
    this.draw();
  }

  get everyRank() {
    return this.runs.flatMap((run) => run.ranks);
  }

  foldAll() {
    const open = !this.everyRank.every((rank) => this.isOpen(rank));
    for (const { run, rank } of this.everyRank) this.open.set(`${run.number}:${rank}`, open);
    this.lay();
    this.update();
    this.draw();
  }

  // Unfold the ranks that carry most of the critical path in view, and fold the others.
  foldOthers() {
    if (!this.critical) this.toggle("critical");
    for (const run of this.runs.filter((one) => one.path)) {
      const critical = criticalRanks(run.path, this.view.begin + run.shift, this.view.end + run.shift);
      for (const { rank } of run.ranks) this.open.set(`${run.number}:${rank}`, critical.has(rank));
    }
    this.lay();
    this.update();
    this.draw();
  }

  chooseRank(by) {
    const ranks = this.everyRank;
    this.focus = Math.min(Math.max(this.focus + by, 0), ranks.length - 1);
    const mine = this.items.filter((item) => item.rank === ranks[this.focus]);
    const [top, bottom] = [mine[0].y, mine.at(-1).y + mine.at(-1).height + RULER];
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (bottom > scrollTop + clientHeight) this.scroller.scrollTop = bottom - clientHeight;
    this.draw();
  }

  // ---- what the user does

  toggle(what) {
    this[what] = !this[what];
    if (what === "critical" && this.critical && !this.runs.some((run) => run.path)) {
      if (this.options.load) void this.options.load({ critical: true });
      else this.say("These data have no critical path: use critical=True");
    }
    this.update();
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT" || !this.runs.length) return;
    const actions = {
      w: () => this.zoom(0.7), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7),
      s: () => this.zoom(1 / 0.7), "-": () => this.zoom(1 / 0.7),
      a: () => this.pan(-0.15), ArrowLeft: () => this.pan(-0.15),
      d: () => this.pan(0.15), ArrowRight: () => this.pan(0.15),
      ArrowUp: () => this.chooseRank(-1), ArrowDown: () => this.chooseRank(1),
      Enter: () => this.focus >= 0 && this.fold(this.everyRank[this.focus]),
      u: () => this.foldAll(), r: () => this.foldOthers(), l: () => this.toggle("links"), c: () => this.toggle("critical"),
      0: () => this.home(), f: () => this.whole(), n: () => this.resume(), "?": () => this.help(),
      Escape: () => (this.keys.hidden ? this.select(null) : this.help()),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (event.key === "Enter" && event.target !== this.root)) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.pointer = this.placeOf(event);
      this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / Math.max(this.width - GUTTER, 1));
    }
  }

  placeOf(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  press(event) {
    if (event.button !== 0) return;
    const from = this.placeOf(event);
    if (from.x <= GUTTER && from.y > RULER) {
      const found = this.at(event);
      if (found?.rank) this.fold(found.rank);
      return;
    }
    this.drag = { from, view: { ...this.view }, selects: from.y <= RULER, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
    this.root.focus({ preventScroll: true });
  }

  move(event) {
    this.pointer = this.placeOf(event);
    const { drag } = this;
    if (!drag) {
      this.hover(this.at(event));
      return;
    }
    drag.to = this.pointer;
    drag.moved ||= Math.hypot(drag.to.x - drag.from.x, drag.to.y - drag.from.y) >= DRAG;
    if (!drag.moved) return;
    if (drag.selects) this.draw();
    else {
      const by = ((drag.from.x - drag.to.x) / (this.width - GUTTER)) * (drag.view.end - drag.view.begin);
      this.window(drag.view.begin + by, drag.view.end + by);
    }
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    if (!drag.moved) this.select(this.at(event));
    else if (drag.selects) {
      const ends = [drag.from.x, this.placeOf(event).x].sort((one, other) => one - other);
      this.window(...ends.map((x) => this.timeAt(Math.max(x, GUTTER))));
    }
    this.draw();
  }

  // The rank, row and span at a place.
  at(event) {
    const { x, y } = this.placeOf(event);
    const under = y - RULER + this.scroller.scrollTop;
    if (y <= RULER) return null;
    const item = this.items.find((one) => under >= one.y && under < one.y + one.height);
    if (!item || item.type === "head") return null;
    if (x <= GUTTER) return item;
    const upper = under - item.y < item.height / 2;
    const track = item.type === "rank" ? item.rank.tracks[upper ? 0 : 1] : item.run.sequences[item.place];
    const { start, end, kind } = item.run.columns;
    const time = this.timeAt(x) + item.run.shift;
    const near = (1.5 * (this.view.end - this.view.begin)) / (this.width - GUTTER);
    let best;
    for (let at = firstAbove(track.reach, time - near); at < track.spans.length; at += 1) {
      const span = track.spans[at];
      if (start[span] > time + near) break;
      if (end[span] < time - near || this.hidden.has(kind[span])) continue;
      const inside = start[span] <= time && time <= end[span];
      if (!best || inside || !best.inside) best = { span, inside };
    }
    return { ...item, span: best?.span };
  }

  hover(found) {
    this.hovered = found && found.span !== undefined ? found : null;
    this.canvas.style.cursor = found && this.pointer?.x <= GUTTER ? "pointer" : "default";
    this.tip.hidden = !this.hovered;
    if (this.hovered) {
      this.tip.textContent = this.words(this.hovered.run, this.hovered.span).join("\n");
      const [box, root] = [this.canvas.getBoundingClientRect(), this.root.getBoundingClientRect()];
      const x = box.left - root.left + this.pointer.x;
      const y = box.top - root.top + this.pointer.y;
      const { offsetWidth, offsetHeight } = this.tip;
      this.tip.style.left = `${Math.max(4, Math.min(x + 14, root.width - offsetWidth - 4))}px`;
      this.tip.style.top = `${y + 18 + offsetHeight > root.height ? y - offsetHeight - 10 : y + 18}px`;
    }
    this.draw();
  }

  words(run, span) {
    const { kind, start, end, step, bucket, bytes: sizes, peer } = run.columns;
    const lines = [`${this.kindNames[kind[span]]} on rank ${run.rankOf(span)}, ${seconds(end[span] - start[span])}`];
    lines.push(`step ${step[span]}` + (bucket[span] >= 0 ? `, bucket ${bucket[span]}` : ""));
    if (sizes[span]) lines.push(bytes(sizes[span]) + (peer[span] >= 0 ? `, peer rank ${peer[span]}` : ""));
    return lines;
  }

  select(found) {
    const { run, span } = found ?? {};
    if (span !== undefined && this.isLive) this.follows = false; // the next drawing would have other spans
    this.selected = span === undefined ? null : { run, span, related: run.related(span) };
    this.update();
    this.draw();
  }

  // What a message or a collective waited for.
  story({ run, span, related }) {
    const { start, end } = run.columns;
    if (related.length < 2) return "";
    if (run.partner[span] >= 0) {
      const [send, receive] = run.columns.sent.includes(span) ? [span, run.partner[span]] : [run.partner[span], span];
      const late = start[send] - start[receive];
      let waits = "neither waited";
      if (late) waits = late > 0 ? `the receiver had waited for ${seconds(late)}` : `the sender waited for ${seconds(-late)}`;
      const took = seconds(Math.max(0, end[receive] - start[send]));
      const ends = `from rank ${run.rankOf(send)} to rank ${run.rankOf(receive)}`;
      return `message ${ends}: ${took} from the call to the arrival; ${waits}`;
    }
    const inOrder = [...related].sort((one, other) => start[one] - start[other]);
    const [first, last] = [inOrder[0], inOrder.at(-1)];
    const late = seconds(start[last] - start[first]);
    return `on ${related.length} ranks: rank ${run.rankOf(last)} arrived last, ${late} after rank ${run.rankOf(first)}`;
  }

  help() {
    this.keys.hidden = !this.keys.hidden;
    this.root.focus({ preventScroll: true });
  }

  say(text) {
    this.message = text;
    this.update();
  }

  get trace() {
    return JSON.stringify(chromeTrace(this.runs, this.content.kinds));
  }

  get title() {
    return this.runs.map((run) => run.name).join(" and ");
  }

  get fileName() {
    return this.runs.map((run) => run.id).join("-");
  }

  save() {
    download(new Blob([this.trace], { type: "application/json" }), `${this.fileName}.json`);
  }

  savePicture() {
    this.canvas.toBlob((blob) => download(blob, `${this.fileName}.png`));
  }

  async perfetto() {
    const origin = this.options.perfetto ?? PERFETTO;
    if (await openInPerfetto(this.trace, this.title, origin)) return;
    this.save();
    this.say(`${origin} does not answer. The trace was saved: open ${origin} and choose "Open trace file"`);
  }

  update() {
    if (!this.runs.length) return;
    const { fold, links, critical, ranks, follow } = this.buttons;
    const press = (button, on) => button.setAttribute("aria-pressed", String(Boolean(on)));
    fold.textContent = this.everyRank.every((rank) => this.isOpen(rank)) ? "Fold all" : "Unfold all";
    press(links, this.links);
    links.hidden = !this.runs.some((run) => run.columns.sent.length);
    press(critical, this.critical);
    critical.hidden = !this.options.load && !this.runs.some((run) => run.path);
    ranks.hidden = !this.runs.some((run) => run.path && run.ranks.length > 2);
    follow.hidden = !(this.isLive || this.pending || this.left);
    press(follow, this.follows);
    const newest = this.pending?.runs[0].steps.at(-1);
    follow.textContent = newest === undefined ? "Follow" : `Follow (newest step ${newest})`;
    const parts = [];
    if (this.selected) {
      const { run, span } = this.selected;
      const [title, ...more] = this.words(run, span);
      parts.push(element("b", {}, title), ` · ${more.join(" · ")}`);
      const story = this.story(this.selected);
      if (story) parts.push(element("span", {}, ` · ${story}`));
    } else {
      const notes = this.runs.map((run) => this.note(run)).filter(Boolean);
      const text = [...notes, this.message, this.hint].filter(Boolean).join(" · ");
      parts.push(element("span", {}, text || "Press ? for the keys"));
    }
    this.status.replaceChildren(...parts);
  }

  note({ name, unusual, note }) {
    const words = [];
    if (unusual.length) {
      const [step, times] = unusual.reduce((one, other) => (one[1] >= other[1] ? one : other));
      const more = unusual.length > 1 ? ` (and ${unusual.length - 1} more)` : "";
      const where = "is outside the window at first: f shows all steps";
      words.push(`step ${step} takes ${times} times the median${more} and ${where}`);
    }
    if (note) words.push(note);
    return words.length ? (this.runs.length > 1 ? `${name}: ` : "") + words.join(", ") : "";
  }

  // ---- drawing

  xOf(time) {
    return GUTTER + ((time - this.view.begin) / (this.view.end - this.view.begin)) * (this.width - GUTTER);
  }

  timeAt(x) {
    return this.view.begin + ((x - GUTTER) / (this.width - GUTTER)) * (this.view.end - this.view.begin);
  }

  draw() {
    if (!this.frame) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.paint();
      });
    }
  }

  paint() {
    const { canvas, scroller } = this;
    const [width, height] = [scroller.clientWidth, scroller.clientHeight];
    if (!this.runs.length || width <= GUTTER || height <= RULER) return;
    const ratio = globalThis.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    Object.assign(this, { width, height, labels: [] });
    this.readColors();
    const g = (this.g = canvas.getContext("2d"));
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = this.colors.ground;
    g.fillRect(0, 0, width, height);
    const top = RULER - scroller.scrollTop;
    const seen = this.items.filter((item) => item.y + item.height + top > RULER && item.y + top < height);
    g.save();
    g.beginPath();
    g.rect(0, RULER, width, height - RULER);
    g.clip();
    this.paintSteps(top);
    for (const item of seen) this.paintItem(item, item.y + top);
    g.beginPath();
    g.rect(GUTTER, RULER, width - GUTTER, height - RULER);
    g.clip();
    const hint = [];
    if (this.links) hint.push(this.paintLinks(top));
    if (this.critical) hint.push(...this.runs.map((run) => this.paintPath(run, top)));
    this.paintSelection(top);
    g.restore();
    this.paintRuler();
    const text = hint.filter(Boolean).join(" · ");
    if (text !== (this.hint)) {
      this.hint = text;
      this.update();
    }
    this.root.dataset.firstPaintMs ??= (performance.now() - this.mountedMs).toFixed(1);
    this.root.dataset.spans = this.runs.reduce((sum, run) => sum + run.size, 0);
  }

  // Text that fits into a width, or nothing; all of it is noted, so that a test sees whether any lies over another.
  text(words, x, y, room, { size = 12, bold = false, color = this.colors.ink, align = "left", cut = true } = {}) {
    const { g } = this;
    g.font = `${bold ? "600 " : ""}${size}px ${FONT}`;
    let shown = words;
    if (g.measureText(shown).width > room) {
      if (!cut) return 0;
      let [low, high] = [0, words.length];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (g.measureText(`${words.slice(0, middle)}…`).width <= room) low = middle;
        else high = middle - 1;
      }
      if (low < 2) return 0;
      shown = `${words.slice(0, low)}…`;
    }
    const { width } = g.measureText(shown);
    const left = align === "center" ? x - width / 2 : align === "right" ? x - width : x;
    g.fillStyle = color;
    g.textAlign = "left";
    g.textBaseline = "middle";
    g.fillText(shown, left, y);
    this.labels.push({ text: shown, left, right: left + width, top: y - size * 0.55, bottom: y + size * 0.55 });
    return width;
  }

  paintItem(item, y) {
    const { g, colors, width } = this;
    const { run } = item;
    if (item.type === "head") {
      const used = this.text(run.name, 8, y + 11, width - 16, { bold: true, size: 13 });
      if (run.note) this.text(run.note, 20 + used, y + 11, width - used - 28, { size: 11, color: colors.muted });
      this.paintStepNumbers(run, y + 28);
      return;
    }
    const mine = this.focus >= 0 && this.everyRank[this.focus] === item.rank;
    if (mine) {
      g.fillStyle = colors.soft;
      g.fillRect(0, y, GUTTER, item.height);
      g.fillStyle = colors.accent;
      g.fillRect(0, y, 3, item.height);
    }
    if (item.leads) {
      g.fillStyle = colors.line;
      g.fillRect(0, Math.round(y) - (item.type === "row" ? 3 : 1), width, 1);
    }
    const middle = y + item.height / 2;
    const size = Math.min(12, item.height - 1);
    if (item.type === "rank") {
      this.text(`▸ rank ${item.rank.rank}`, 8, middle, GUTTER - 14, { size, bold: item.height >= 15 });
      const [upper, lower] = item.rank.tracks;
      const inner = item.height - 1;
      this.paintSpans(run, upper, y, inner * 0.52);
      this.paintSpans(run, lower, y + inner * 0.52, inner * 0.48);
      return;
    }
    const { lane, number } = run.rows[item.place];
    if (item.leads) this.text(`▾ rank ${item.rank.rank}`, 8, middle, LANE_AT - 12, { bold: true });
    if (number === 0) this.text(lane, LANE_AT, middle, GUTTER - LANE_AT - 6, { color: colors.muted, size: 11 });
    this.paintSpans(run, run.sequences[item.place], y, item.height - 1);
  }

  // Spans of a pixel or more are bars. In a narrower column each kind is as high as its share of the column's time.
  paintSpans(run, { spans, reach }, y, height) {
    const { g, hidden, view, width, content } = this;
    const { start, end, kind } = run.columns;
    const begin = view.begin + run.shift;
    const scale = (width - GUTTER) / (view.end - view.begin);
    const pixel_s = 1 / scale;
    const shares = (this.shares ??= new Float64Array(content.kinds.length));
    const labelled = height >= (this.critical ? 18 : 12);
    let [column, used, last] = [-1, 0, -1];
    const flush = () => {
      if (column < 0) return;
      const total = Math.min(1, Math.max(used * scale, 1 / height)); // at least a pixel
      let bottom = y + height;
      for (let code = 0; code < shares.length; code += 1) {
        if (!shares[code]) continue;
        const part = (shares[code] / used) * total * height;
        g.fillStyle = content.colors[code];
        g.fillRect(column, bottom - part, 1, part);
        bottom -= part;
        shares[code] = 0;
      }
      [column, used, last] = [-1, 0, -1];
    };
    for (let at = firstAbove(reach, begin); at < spans.length; at += 1) {
      const span = spans[at];
      const code = kind[span];
      const left = GUTTER + (start[span] - begin) * scale;
      if (left >= width) break;
      const right = GUTTER + (end[span] - begin) * scale;
      if (right < GUTTER || hidden.has(code)) continue;
      if (right - left < 1) {
        const mine = Math.max(Math.floor(left), GUTTER);
        if (mine !== column) flush();
        column = mine;
        const length = Math.max(end[span] - start[span], pixel_s * 1e-3);
        shares[code] += length;
        used += length;
        continue;
      }
      flush();
      const from = Math.max(left, GUTTER);
      const to = Math.min(right, width);
      if (last !== code) g.fillStyle = content.colors[code];
      last = code;
      g.fillRect(from, y, Math.max(to - from - (to - from > 3 ? 0.7 : 0), 0.7), height);
      if (labelled && to - from > 18) {
        this.barText(run, span, from, to, y + height / 2);
        last = -1;
      }
    }
    flush();
  }

  barText(run, span, from, to, y) {
    const { bucket, step, kind } = run.columns;
    const code = kind[span];
    const number = bucket[span] >= 0 ? bucket[span] : this.content.compute.includes(code) ? step[span] : "";
    const room = to - from - 6;
    const style = { size: 10, color: this.inks[code], align: "center", cut: false };
    const middle = (from + to) / 2;
    const whole = this.text(`${this.kindNames[code]} ${number}`.trim(), middle, y, room, style);
    if (!whole && number !== "") this.text(String(number), middle, y, room, style);
  }

  paintSteps(top) {
    const { g, colors } = this;
    g.strokeStyle = colors.muted;
    g.globalAlpha = 0.45;
    g.lineWidth = 1;
    g.setLineDash([2, 3]);
    for (const run of this.runs) {
      const mine = this.items.filter((item) => item.run === run);
      const [from, to] = [mine[0].y + HEAD - 6 + top, mine.at(-1).y + mine.at(-1).height + top];
      let before = -Infinity;
      for (const begin of run.begins) {
        const x = this.xOf(begin - run.shift);
        if (x < GUTTER || x > this.width || x - before < 4) continue;
        before = x;
        g.beginPath();
        g.moveTo(Math.round(x) + 0.5, Math.max(from, RULER));
        g.lineTo(Math.round(x) + 0.5, Math.min(to, this.height));
        g.stroke();
      }
    }
    g.setLineDash([]);
    g.globalAlpha = 1;
  }

  paintStepNumbers(run, y) {
    const places = run.begins.map((begin) => this.xOf(begin - run.shift));
    const last = firstAbove(places, GUTTER) - 1; // the step in which the window begins
    let free = GUTTER;
    for (let at = Math.max(last, 0); at < places.length && places[at] < this.width; at += 1) {
      const x = Math.max(places[at], GUTTER) + 3;
      const next = Math.min(Math.max(places[at + 1] ?? this.xOf(run.length - run.shift), GUTTER), this.width);
      if (x < free || (at === last && next - x < 52) || next <= GUTTER) continue;
      const style = { size: 11, color: this.colors.muted, cut: false };
      const used = this.text(`step ${run.steps[at]}`, x, y, this.width - x - 2, style);
      if (used) free = x + used + 10;
    }
  }

  paintRuler() {
    const { g, colors, width, view } = this;
    g.fillStyle = colors.soft;
    g.fillRect(0, 0, width, RULER);
    const length = view.end - view.begin;
    const units = [[2e-6, "ns", 1e9], [2e-3, "µs", 1e6], [10, "ms", 1e3], [Infinity, "s", 1]];
    const [, unit, factor] = units.find(([limit]) => length < limit);
    const rough = (length * factor * 90) / (width - GUTTER);
    const power = 10 ** Math.floor(Math.log10(rough));
    const each = power * [1, 2, 5, 10].find((times) => power * times >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(each) + 1e-9));
    this.text(`time (${unit})`, 8, RULER / 2, GUTTER - 16, { size: 11, color: colors.muted });
    let free = GUTTER;
    for (let at = Math.ceil((view.begin * factor) / each); at * each <= view.end * factor; at += 1) {
      const x = this.xOf((at * each) / factor);
      g.fillStyle = colors.muted;
      g.fillRect(x, RULER - 5, 1, 5);
      if (x + 3 < free) continue;
      const used = this.text((at * each).toFixed(digits), x + 4, RULER / 2, width - x - 6, { size: 11, cut: false });
      if (used) free = x + used + 12;
    }
    if (this.drag?.selects && this.drag.moved) {
      const [from, to] = [this.drag.from.x, this.drag.to.x].sort((one, other) => one - other);
      g.globalAlpha = 0.25;
      g.fillStyle = colors.accent;
      g.fillRect(Math.max(from, GUTTER), 0, to - Math.max(from, GUTTER), this.height);
      g.globalAlpha = 1;
    }
    g.fillStyle = colors.line;
    g.fillRect(0, RULER - 1, width, 1);
  }

  arrow(x0, y0, x1, y1, strong) {
    const { g, colors } = this;
    g.strokeStyle = g.fillStyle = strong ? colors.accent : colors.ink;
    g.globalAlpha = strong ? 1 : 0.6;
    g.lineWidth = strong ? 2 : 1;
    const bend = Math.min(Math.max(Math.abs(x1 - x0) / 2, 6), 60);
    g.beginPath();
    g.moveTo(x0, y0);
    g.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    g.stroke();
    g.beginPath();
    g.moveTo(x1, y1);
    g.lineTo(x1 - 7, y1 - 3.5);
    g.lineTo(x1 - 7, y1 + 3.5);
    g.fill();
    g.globalAlpha = 1;
  }

  paintLink(run, send, receive, top, strong) {
    const { start, end, row } = run.columns;
    const [from, to] = [start[send], end[receive]].map((at) => this.xOf(at - run.shift));
    this.arrow(from, run.center[row[send]] + top, to, run.center[row[receive]] + top, strong);
  }

  paintLinks(top) {
    let count = 0;
    const chosen = [];
    for (const run of this.runs) {
      const { start, end, sent, received } = run.columns;
      const [begin, stop] = [this.view.begin + run.shift, this.view.end + run.shift];
      for (let at = 0; at < sent.length; at += 1) {
        if (start[sent[at]] > stop || end[received[at]] < begin) continue;
        count += 1;
        if (count <= MAX_LINKS) chosen.push([run, sent[at], received[at]]);
      }
    }
    if (count > MAX_LINKS) return `${count.toLocaleString("en")} messages in view: zoom in to see them`;
    for (const [run, send, receive] of chosen) this.paintLink(run, send, receive, top, false);
    return "";
  }

  // The path of each step through its bars, and the shares of kinds in what is in view.
  paintPath(run, top) {
    const { path } = run;
    if (!path) return "";
    const { g, colors } = this;
    const { start, end, span, rank, step, kind } = path;
    const first = new Map(run.ranks.map((one) => [one.rank, one.rows[0]]));
    const shares = new Map();
    let [total, before] = [0, -1];
    g.beginPath();
    for (let at = 0; at < start.length; at += 1) {
      const [from, to] = [start[at] - run.shift, end[at] - run.shift];
      if (to < this.view.begin || from > this.view.end || !first.has(rank[at])) {
        before = -1;
        continue;
      }
      const length = Math.min(to, this.view.end) - Math.max(from, this.view.begin);
      total += length;
      shares.set(kind[at], (shares.get(kind[at]) ?? 0) + length);
      const y = run.pathAt[span[at] >= 0 ? run.columns.row[span[at]] : first.get(rank[at])] + top;
      if (before < 0 || step[before] !== step[at]) g.moveTo(this.xOf(from), y);
      else g.lineTo(this.xOf(from), y);
      g.lineTo(this.xOf(to), y);
      before = at;
    }
    for (const [color, wide] of [[colors.ground, 5], [colors.ink, 2.5]]) {
      g.strokeStyle = color;
      g.lineWidth = wide;
      g.lineJoin = "round";
      g.stroke();
    }
    const sorted = [...shares].sort((one, other) => other[1] - one[1]).slice(0, 4);
    const nameOf = (code) => (code < 0 ? "nothing recorded" : this.kindNames[code]);
    const words = sorted.map(([code, length]) => `${nameOf(code)} ${((100 * length) / total).toFixed(0)} %`);
    const whose = this.runs.length > 1 ? `${run.name}: ` : "";
    return words.length ? `${whose}critical path in view: ${words.join(", ")}` : "";
  }

  outline(run, span, top, color, wide) {
    const { g } = this;
    const { start, end, row } = run.columns;
    const rank = run.rankOf(span);
    const shows = (one) => (one.type === "row" ? one.place === row[span] : one.rank?.rank === rank);
    const item = this.items.find((one) => one.run === run && shows(one));
    if (!item) return;
    const [from, to] = [start[span], end[span]].map((at) => this.xOf(at - run.shift));
    const half = item.type === "rank" ? item.height / 4 : item.height / 2;
    g.strokeStyle = color;
    g.lineWidth = wide;
    g.strokeRect(from - 0.5, run.center[row[span]] - half + top, Math.max(to - from, 2), 2 * half - 1);
  }

  paintSelection(top) {
    const { selected, hovered, colors } = this;
    if (selected) {
      const { run, span, related } = selected;
      for (const other of related) this.outline(run, other, top, colors.accent, other === span ? 2.5 : 1.5);
      if (run.partner[span] >= 0) {
        const sends = run.columns.sent.includes(span);
        this.paintLink(run, sends ? span : run.partner[span], sends ? run.partner[span] : span, top, true);
      } else if (related.length > 1) this.paintCollective(run, related, top);
    }
    if (hovered && hovered.span !== selected?.span) this.outline(hovered.run, hovered.span, top, colors.ink, 1.5);
  }

  // From the call of the last rank to arrive to the calls of the others.
  paintCollective(run, related, top) {
    const { start, row } = run.columns;
    const last = related.reduce((one, other) => (start[one] > start[other] ? one : other));
    const x = this.xOf(start[last] - run.shift);
    const { g, colors } = this;
    g.strokeStyle = colors.accent;
    g.lineWidth = 1.5;
    g.setLineDash([4, 3]);
    const heights = related.map((span) => run.center[row[span]] + top);
    g.beginPath();
    g.moveTo(x, Math.min(...heights));
    g.lineTo(x, Math.max(...heights));
    g.stroke();
    g.setLineDash([]);
  }
}

export function mount(place, options = {}) {
  const viewer = new Viewer(place, options);
  place.timeline = viewer; // for tests, and for the console
  return viewer;
}

// For anywidget: the content is the text of another model. See widget.py.
async function render({ model, el }) {
  const source = await model.widget_manager.get_model(model.get("source"));
  const viewer = mount(el, { fit: 520 });
  // The rules of these classes are in plots/live/still.py.
  const showState = () => {
    const view = el.closest(".workbench-view")?.classList;
    view?.toggle("workbench-live", viewer.runs.length > 0 && source.comm_live !== false);
    view?.toggle("workbench-ended", source.comm_live === false);
  };
  const show = async () => {
    if (source.get("value")) await viewer.show(JSON.parse(source.get("value")));
    showState();
  };
  source.on("change:value", show);
  source.on("comm_live_update", showState);
  void show();
  return () => {
    source.off("change:value", show);
    source.off("comm_live_update", showState);
    viewer.dispose();
  };
}
export default { render };
