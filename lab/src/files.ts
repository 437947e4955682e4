// What the browser saves as a file: tables as CSV, charts as SVG and PNG.

import { Value } from './api';

const STYLES = ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linejoin', 'opacity', 'font-size'];
const TITLE_PX = 28;
const KEY_PX = 18; // of a line of the legend
const PNG_SCALE = 2;

export function download(name: string, content: Blob): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** CSV with the values as they are stored; a text that a spreadsheet would compute is quoted with '. */
export function csv(lines: Value[][]): Blob {
  const cell = (value: Value) => {
    if (value === null || value === undefined) {
      return '';
    }
    const text = typeof value === 'string' && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return new Blob([lines.map(line => line.map(cell).join(',')).join('\r\n') + '\r\n'], { type: 'text/csv' });
}

/**
 * A chart with its title and legend as SVG that needs no style sheet, with the colours of the page.
 *
 * keys: name and colour of each line.
 */
export function svg(chart: SVGSVGElement, title: string, keys: { name: string; color: string }[]): string {
  const width = chart.clientWidth;
  const bottom = TITLE_PX + chart.clientHeight;
  const copy = chart.cloneNode(true) as SVGSVGElement;
  copy.setAttribute('y', String(TITLE_PX));
  inline(chart, copy);
  const page = getComputedStyle(chart.closest('.wb-Pane') ?? document.body);
  const colors = getComputedStyle(chart);
  const resolved = (color: string) => color.replace(/var\((--[\w-]+).*\)$/, (_, name) => colors.getPropertyValue(name).trim());
  const text = (x: number, y: number, words: string) => `<text x="${x}" y="${y}">${escaped(words)}</text>`;
  const legend = keys.map(({ name, color }, row) => {
    const y = bottom + KEY_PX * row;
    return `<path d="M8 ${y + 8}h18" stroke="${resolved(color)}" stroke-width="3"/>${text(32, y + 12, name)}`;
  });
  const height = bottom + KEY_PX * keys.length + 8;
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" font-family="sans-serif" font-size="12" ` +
    `fill="${page.color}"><rect width="100%" height="100%" fill="${page.backgroundColor}"/>${text(8, 18, title)}` +
    `${new XMLSerializer().serializeToString(copy)}${legend.join('')}</svg>`
  );
}

/** SVG as PNG. */
export async function png(content: string): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(content)}`;
  await image.decode();
  const canvas = document.createElement('canvas');
  canvas.width = PNG_SCALE * image.width;
  canvas.height = PNG_SCALE * image.height;
  canvas.getContext('2d')!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) =>
    canvas.toBlob(blob => (blob ? resolve(blob) : reject(new Error('the browser makes no PNG: save the SVG'))))
  );
}

/** Give a copy the styles of what it is a copy of. */
function inline(from: Element, to: Element): void {
  const style = getComputedStyle(from);
  STYLES.forEach(name => to.setAttribute(name, style.getPropertyValue(name)));
  to.removeAttribute('class');
  [...from.children].forEach((child, number) => inline(child, to.children[number]));
}

function escaped(words: string): string {
  return words.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
}
