// How charts are drawn: their x axis, logarithmic losses, and smoothing. Runs and comparisons have the same switches.

import * as React from 'react';

export interface Look {
  axis: 'steps' | 'epochs' | 'seconds';
  log: boolean;
  smooth: number; // share of a curve over which a training loss is averaged
}

export const FIRST_LOOK: Look = { axis: 'steps', log: false, smooth: 0 };
export const X_TITLES = { steps: 'steps', epochs: 'epochs', seconds: 'seconds of training' };
const SMOOTHING: [number, string][] = [[0, 'none'], [0.02, '2 %'], [0.1, '10 %'], [0.3, '30 %']]; // as in a notebook

/** The switches. Epochs are offered if all runs record their length. */
export function Switches(props: { look: Look; change: (look: Look) => void; epochs: boolean }): JSX.Element {
  const { look, change } = props;
  const axes: Look['axis'][] = props.epochs ? ['steps', 'epochs', 'seconds'] : ['steps', 'seconds'];
  return (
    <>
      {axes.map(axis => (
        <button
          key={axis}
          type="button"
          className="wb-Toggle"
          aria-pressed={look.axis === axis}
          onClick={() => change({ ...look, axis })}
        >
          {axis}
        </button>
      ))}
      <button type="button" className="wb-Toggle" aria-pressed={look.log} onClick={() => change({ ...look, log: !look.log })}>
        logarithmic loss
      </button>
      <label className="wb-Quiet" title="Share of a curve over which the training loss is averaged">
        smoothing{' '}
        <select value={look.smooth} onChange={event => change({ ...look, smooth: Number(event.target.value) })}>
          {SMOOTHING.map(([share, name]) => (
            <option key={share} value={share}>
              {name}
            </option>
          ))}
        </select>
      </label>
    </>
  );
}

/** The places of a curve's points on the x axis. */
export function abscissa(curve: { steps: number[]; seconds: number[] }, axis: Look['axis'], stepsPerEpoch: number | null): number[] {
  return axis === 'seconds' ? curve.seconds : axis === 'epochs' ? curve.steps.map(step => step / stepsPerEpoch!) : curve.steps;
}

/** Each value's mean with its neighbours, fewer near the ends: `moving_average` of workbench/plots/lines.py. */
export function smoothed<T extends number | null>(values: T[], share: number): T[] {
  const half = Math.floor(Math.round(share * values.length) / 2);
  return values.map((value, index) => {
    const reach = Math.min(index, values.length - 1 - index, half);
    const near = values.slice(index - reach, index + reach + 1).filter(one => one !== null) as number[];
    return value === null ? value : (near.reduce((a, b) => a + b, 0) / near.length as T);
  });
}
