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

const T95 = [
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11,
  2.101, 2.093, 2.086
]; // 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom

export interface Interval {
  mean: number;
  half: number | null; // half the width of the 95 % interval of the mean; null for one value
}

/** The mean of values, with its 95 % interval by Student's t. */
export function interval(values: number[]): Interval {
  const n = values.length;
  const mean = values.reduce((a, b) => a + b, 0) / n;
  if (n < 2) {
    return { mean, half: null };
  }
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1);
  const half = (T95[n - 2] ?? 1.96 + 2.37 / (n - 1)) * Math.sqrt(variance / n);
  return { mean, half: half > 1e-12 * Math.abs(mean) ? half : 0 }; // equal values have a mean that is rounded
}

/** Digits of a number next to its uncertainty, which has two: "0.1234 ± 0.0056". */
export function withInterval(found: Interval, scale = 1, unit = ''): string {
  const mean = found.mean * scale;
  if (found.half === null) {
    return `${digits(mean)}${unit}`;
  }
  const half = found.half * scale;
  if (!(half > 0) || Math.abs(mean) >= 1e5 || half < 1e-4) {
    return `${digits(mean)} ± ${digits(half)}${unit}`;
  }
  const places = Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(half))));
  return `${mean.toFixed(places)} ± ${half.toFixed(places)}${unit}`;
}
