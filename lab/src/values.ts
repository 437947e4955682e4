// Names of a run's entries, and their values as text.

import { Value } from './api';
import { bytes, count, digits, duration, Interval, percent, withInterval } from './format';

const TITLES: Record<string, string> = {
  status: 'state',
  label: 'algorithm',
  workers: 'ranks',
  loss: 'test loss',
  train_loss: 'training loss',
  seconds: 'training time',
  bytes_sent: 'sent',
  batch_size: 'batch size',
  algorithm: 'class',
  left_s: 'time left',
  num_steps: 'steps planned',
  run: 'name'
};

export function title(key: string): string {
  return TITLES[key] ?? key.replace(/^set\./, '').replace(/_/g, ' ');
}

/** A value as it is shown. */
export function shown(key: string, value: Value): string {
  if (value === null || value === undefined) {
    return '';
  }
  if (typeof value === 'number') {
    switch (key) {
      case 'accuracy':
        return percent(value);
      case 'seconds':
      case 'left_s':
        return duration(value);
      case 'bytes_sent':
        return bytes(value);
      case 'steps':
      case 'samples':
      case 'num_steps':
        return count(value);
      default:
        return Number.isInteger(value) ? String(value) : digits(value);
    }
  }
  return key === 'created' ? String(value).slice(0, 19).replace('T', ' ') : String(value);
}

/** A mean with its interval, as it is shown. */
export function shownInterval(key: string, found: Interval): string {
  if (!found.half) {
    return shown(key, found.mean); // one value, or equal ones
  }
  switch (key) {
    case 'accuracy':
      return withInterval(found, 100, ' %');
    case 'seconds':
      return found.mean < 60 ? withInterval(found, 1, ' s') : `${duration(found.mean)} ± ${duration(found.half)}`;
    case 'bytes_sent':
      return `${bytes(Math.round(found.mean))} ± ${bytes(Math.round(found.half))}`;
    default:
      return withInterval(found);
  }
}
