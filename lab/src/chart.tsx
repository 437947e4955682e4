// Line charts as SVG.

import * as React from 'react';

import { complain } from './actions';
import { csv, download, png, svg } from './files';
import { digits } from './format';

export interface Line {
  name: string;
  x: number[];
  y: (number | null)[];
  color: string;
  dashed?: boolean;
  /** The lowest and the highest of the runs that the line is the mean of. */
  low?: number[];
  high?: number[];
}

/** Colours of lines next to each other: those of `wb.plots`. */
export const CYCLE = ['#0072B2', '#D55E00', '#009E73', '#E69F00', '#CC79A7', '#56B4E9', '#882255', '#999933'];

/** The losses of a run, without axes. */
export function Sparkline(props: { values: (number | null)[] | null | undefined; label: string }): JSX.Element {
  const width = 72;
  const height = 20;
  const values = (props.values || []).filter((value): value is number => value !== null);
  if (values.length < 2) {
    return <span className="wb-Sparkline" />;
  }
  const low = Math.min(...values);
  const high = Math.max(...values);
  const points = values.map((value, index) => {
    const x = 1 + (index / (values.length - 1)) * (width - 4);
    const y = 2 + (1 - (value - low) / (high - low || 1)) * (height - 4);
    return [x, y];
  });
  const [endX, endY] = points[points.length - 1];
  return (
    <svg className="wb-Sparkline" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={props.label}>
      <title>{props.label}</title>
      <polyline points={points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(' ')} />
      <circle cx={endX} cy={endY} r="1.8" />
    </svg>
  );
}

/** Return about `number` round values from low to high. */
function ticks(low: number, high: number, number: number): number[] {
  const rough = (high - low) / Math.max(1, number);
  if (!(rough > 0) || !isFinite(rough)) {
    return [low];
  }
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= rough) ?? rough;
  const found: number[] = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

function short(value: number, range: number): string {
  if (Math.abs(value) >= 1e6) {
    return `${Number((value / 1e6).toPrecision(4))}M`;
  }
  if (Math.abs(value) >= 1e4) {
    return `${Number((value / 1e3).toPrecision(4))}k`;
  }
  const places = range > 0 ? Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(range)))) : 2;
  return String(Number(value.toFixed(places)));
}

/** The points of lines as CSV. */
function table(xTitle: string, yTitle: string, lines: Line[]): Blob {
  const points = lines.flatMap(line => line.x.map((x, index) => [line.name, x, line.y[index], line.low?.[index], line.high?.[index]]));
  return csv([['curve', xTitle, yTitle, 'lowest', 'highest'], ...points]);
}

const MARGIN = { left: 52, right: 12, top: 8, bottom: 34 };

/** Lines on one pair of axes. The width is that of its place. */
export function Chart(props: {
  title: string;
  xTitle: string;
  range: readonly [number, number]; // of x
  lines: Line[];
  log?: boolean;
  format?: (value: number) => string;
}): JSX.Element {
  const box = React.useRef<HTMLDivElement>(null);
  const [width, setWidth] = React.useState(0);
  const [at, setAt] = React.useState<number | null>(null);
  React.useLayoutEffect(() => {
    const element = box.current;
    if (!element) {
      return;
    }
    const measure = () => setWidth(element.clientWidth);
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);
  const height = 220;
  const log = Boolean(props.log);
  const good = (value: number | null): value is number =>
    value !== null && isFinite(value) && (!log || value > 0);
  const lines = props.lines.filter(line => line.y.some(good));
  const xs = lines.flatMap(line => line.x.filter((_, index) => good(line.y[index])));
  const ys = lines.flatMap(line => [...line.y, ...(line.low ?? []), ...(line.high ?? [])].filter(good)).map(value => (log ? Math.log10(value) : value));
  const save = async (format: string) => {
    const name = `${props.title.toLowerCase().replace(/\W+/g, '-')}.${format}`;
    if (format === 'csv') {
      return download(name, table(props.xTitle, props.title, lines));
    }
    const text = svg(box.current!.querySelector<SVGSVGElement>(':scope > svg')!, props.title, lines);
    download(name, format === 'svg' ? new Blob([text], { type: 'image/svg+xml' }) : await png(text));
  };
  const legend = (
    <div className="wb-Chart-legend">
      <span className="wb-Chart-title">{props.title}</span>
      {lines.map(line => (
        <span key={line.name} className="wb-Chart-key">
          <svg width="18" height="8" aria-hidden="true">
            <line x1="0" x2="18" y1="4" y2="4" stroke={line.color} strokeWidth="2" strokeDasharray={line.dashed ? '4 3' : undefined} />
          </svg>
          {line.name}
        </span>
      ))}
      <span className="wb-Spacer" />
      {xs.length > 0 &&
        ['svg', 'png', 'csv'].map(format => (
          <button
            key={format}
            type="button"
            className="wb-Link wb-Chart-key"
            aria-label={`Save ${props.title.toLowerCase()} as ${format.toUpperCase()}`}
            onClick={() => void save(format).catch(complain)}
          >
            {format.toUpperCase()}
          </button>
        ))}
    </div>
  );
  if (!xs.length || width < MARGIN.left + 60) {
    return (
      <div className="wb-Chart" ref={box}>
        {legend}
        {!xs.length && <div className="wb-Empty">No values yet.</div>}
      </div>
    );
  }
  const xLow = props.range[0];
  const xHigh = Math.max(props.range[1], xLow + 1e-9);
  let yLow = Math.min(...ys);
  let yHigh = Math.max(...ys);
  const space = (yHigh - yLow) * 0.05 || Math.abs(yHigh) * 0.05 || 0.5;
  yLow -= space;
  yHigh += space;
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const placeX = (value: number) => MARGIN.left + ((value - xLow) / (xHigh - xLow)) * (right - MARGIN.left);
  const placeY = (value: number) =>
    bottom - (((log ? Math.log10(value) : value) - yLow) / (yHigh - yLow)) * (bottom - MARGIN.top);
  const path = (line: Line) => {
    let pen = 'M';
    let text = '';
    line.x.forEach((x, index) => {
      const y = line.y[index];
      if (!good(y)) {
        pen = 'M';
        return;
      }
      text += `${pen}${placeX(x).toFixed(1)},${placeY(y).toFixed(1)}`;
      pen = 'L';
    });
    return text;
  };
  const band = (line: Line) => {
    const edge = (values: number[]) =>
      line.x.map((x, index) => [x, values[index]]).filter(([, y]) => good(y)).map(([x, y]) => `${placeX(x).toFixed(1)},${placeY(y).toFixed(1)}`);
    return `M${[...edge(line.high!), ...edge(line.low!).reverse()].join('L')}Z`;
  };
  const format = props.format || ((value: number) => short(value, log ? value : yHigh - yLow));
  const xTicks = ticks(xLow, xHigh, Math.max(2, Math.floor(width / 110))).filter(
    value => props.xTitle !== 'steps' || Number.isInteger(value)
  );
  const yTicks = log
    ? ticks(yLow, yHigh, 6).map(value => Math.pow(10, value))
    : ticks(yLow, yHigh, 6);
  const nearest = (line: Line) => {
    let best = -1;
    line.x.forEach((x, index) => {
      if (good(line.y[index]) && (best < 0 || Math.abs(x - at!) < Math.abs(line.x[best] - at!))) {
        best = index;
      }
    });
    return best;
  };
  const marked = at === null ? [] : lines.map(line => ({ line, index: nearest(line) })).filter(one => one.index >= 0);
  const move = (event: React.MouseEvent<SVGSVGElement>) => {
    const offset = event.clientX - event.currentTarget.getBoundingClientRect().left;
    const share = Math.min(1, Math.max(0, (offset - MARGIN.left) / (right - MARGIN.left)));
    setAt(xLow + share * (xHigh - xLow));
  };
  const summary = lines
    .map(line => {
      const values = line.y.filter(good);
      return `${line.name} ${format(values[values.length - 1])}`;
    })
    .join(', ');
  return (
    <div className="wb-Chart" ref={box}>
      {legend}
      <svg
        width={width}
        height={height}
        role="img"
        aria-label={`${props.title} over ${props.xTitle}; last values: ${summary}`}
        onMouseMove={move}
        onMouseLeave={() => setAt(null)}
      >
        {yTicks.map(value => (
          <g key={value}>
            <line className="wb-Chart-grid" x1={MARGIN.left} x2={right} y1={placeY(value)} y2={placeY(value)} />
            <text className="wb-Chart-tick" x={MARGIN.left - 6} y={placeY(value)} dy="0.35em" textAnchor="end">
              {format(value)}
            </text>
          </g>
        ))}
        {xTicks.map(value => (
          <text key={value} className="wb-Chart-tick" x={placeX(value)} y={bottom + 14} textAnchor="middle">
            {short(value, xHigh - xLow)}
          </text>
        ))}
        <text className="wb-Chart-tick" x={(MARGIN.left + right) / 2} y={height - 4} textAnchor="middle">
          {props.xTitle}
        </text>
        <line className="wb-Chart-axis" x1={MARGIN.left} x2={right} y1={bottom} y2={bottom} />
        {lines
          .filter(line => line.low && line.high)
          .map(line => (
            <path key={line.name} className="wb-Chart-band" d={band(line)} fill={line.color} />
          ))}
        {lines.map(line => (
          <path
            key={line.name}
            className="wb-Chart-line"
            d={path(line)}
            stroke={line.color}
            strokeDasharray={line.dashed ? '5 4' : undefined}
          />
        ))}
        {lines
          .filter(line => line.y.filter(good).length === 1)
          .map(line => {
            const index = line.y.findIndex(good);
            return <circle key={line.name} cx={placeX(line.x[index])} cy={placeY(line.y[index]!)} r="3" fill={line.color} />;
          })}
        {marked.map(({ line, index }) => (
          <circle key={line.name} cx={placeX(line.x[index])} cy={placeY(line.y[index]!)} r="3.5" fill={line.color} />
        ))}
      </svg>
      <div className="wb-Chart-readout" aria-hidden="true">
        {marked.map(({ line, index }) => (
          <span key={line.name}>
            {line.name} {(props.format ?? digits)(line.y[index]!)} at {short(line.x[index], xHigh - xLow)} {props.xTitle}
          </span>
        ))}
      </div>
    </div>
  );
}
