// Numbers, durations and states as text.

const whole = new Intl.NumberFormat('en-US');

export function count(value: number): string {
  return whole.format(value);
}

export function plural(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? '' : 's'}`;
}

export function percent(value: number): string {
  return `${(100 * value).toFixed(1)} %`;
}

export function digits(value: number): string {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) {
    return value.toExponential(1);
  }
  return String(Number(value.toPrecision(3)));
}

export function duration(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s < 60) {
    return s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`;
  }
  const minutes = Math.floor(s / 60);
  if (minutes < 60) {
    return `${minutes} min ${Math.floor(s % 60)} s`;
  }
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

/** "step 120 of 5,000", or what is known of it. */
export function progress(run: { steps: number; num_steps: number | null; epochs?: number | null; status: string }): string {
  if (run.num_steps) {
    return run.steps === run.num_steps
      ? plural(run.steps, 'step')
      : `step ${count(run.steps)} of ${count(run.num_steps)}`;
  }
  return `step ${count(run.steps)}${run.epochs ? `, ${plural(run.epochs, 'epoch')} in total` : ''}`;
}

/** How long ago, in one unit. */
export function age(sinceMs: number): string {
  const s = Math.max(0, (Date.now() - sinceMs) / 1000);
  const [value, unit] = s < 60 ? [s, 's'] : s < 3600 ? [s / 60, 'min'] : s < 172800 ? [s / 3600, 'h'] : [s / 86400, 'd'];
  return `${Math.floor(value)} ${unit} ago`;
}
