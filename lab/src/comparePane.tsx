// Several runs on the same axes, and the settings in which they differ.

import { LabIcon } from '@jupyterlab/ui-components';
import * as React from 'react';

import { Api, Comparison, ENDED, Value } from './api';
import { abscissa, FIRST_LOOK, smoothed, Switches, X_TITLES } from './axes';
import { Chart, CYCLE, Line } from './chart';
import { interval, plural } from './format';
import { PollingPane } from './pollingPane';
import { Sort, sorted, SortHead } from './sorting';
import { shown, shownInterval } from './values';

const LIVE_MS = 2000;
const IDLE_MS = 10000;
const METRICS: Record<string, string> = { train_loss: 'Training loss', test_loss: 'Test loss', accuracy: 'Test accuracy' };

export class ComparePane extends PollingPane<Comparison> {
  constructor(
    readonly names: string[],
    private api: Api,
    private openRun: (name: string) => void,
    icon: LabIcon
  ) {
    super(`Compare ${plural(names.length, 'run')}`, icon, LIVE_MS);
    this.title.caption = names.join('\n');
  }

  protected read(): Promise<Comparison> {
    return this.api.compare(this.names);
  }

  protected received(data: Comparison): void {
    super.received(data);
    const live = data.series.some(series => series.statuses.some(status => ![...ENDED, 'lost'].includes(status)));
    this.setInterval(live ? LIVE_MS : IDLE_MS);
  }

  protected draw(data: Comparison): JSX.Element {
    return <View data={data} openRun={this.openRun} />;
  }
}

function View(props: { data: Comparison; openRun: (name: string) => void }): JSX.Element {
  const { series } = props.data;
  const [look, setLook] = React.useState(FIRST_LOOK);
  const { log } = look;
  const metrics = [...new Set(series.flatMap(one => Object.keys(one.curves)))].filter(name =>
    series.some(one => one.curves[name]?.steps.length > 1) // one value is in the table
  );
  const places = (one: Comparison['series'][0], metric: string) => abscissa(one.curves[metric], look.axis, one.steps_per_epoch);
  const end = Math.max(0, ...series.flatMap(one => Object.keys(one.curves).flatMap(metric => places(one, metric).slice(-1))));
  const lines = (metric: string): Line[] =>
    series.flatMap((one, index) => {
      const curve = one.curves[metric];
      const share = metric === 'train_loss' ? look.smooth : 0;
      return curve
        ? [
            {
              name: one.label + (one.runs.length > 1 ? ` (mean of ${one.runs.length})` : ''),
              x: places(one, metric),
              y: smoothed(curve.values, share),
              low: curve.low && smoothed(curve.low, share),
              high: curve.high && smoothed(curve.high, share),
              color: CYCLE[index % CYCLE.length],
              dashed: index >= CYCLE.length
            }
          ]
        : [];
    });
  return (
    <div className="wb-Run">
      <div className="wb-Axes" role="group" aria-label="Axes">
        <Switches look={look} change={setLook} epochs={series.every(one => one.steps_per_epoch)} />
      </div>
      {metrics.map(metric => (
        <Chart
          key={metric}
          title={METRICS[metric] ?? metric}
          xTitle={X_TITLES[look.axis]}
          range={[0, end]}
          lines={lines(metric)}
          log={log && metric.endsWith('loss')}
          format={metric === 'accuracy' ? value => `${Number((100 * value).toPrecision(4))} %` : undefined}
        />
      ))}
      {series.some(one => one.runs.length > 1) && (
        <p className="wb-Quiet">
          Finished runs that differ only in their seed are one line: their mean at the same step, with a band from the lowest to the
          highest. The table has the mean with its 95 % interval.
        </p>
      )}
      <Differences data={props.data} openRun={props.openRun} />
    </div>
  );
}

function Differences(props: { data: Comparison; openRun: (name: string) => void }): JSX.Element {
  const { series, differences } = props.data;
  const [sort, setSort] = React.useState<Sort | null>(null); // at first, in the order of the curves
  const valueOf = (position: number, key: string): Value => {
    if (key === 'curve') {
      return series[position].label;
    }
    return key === 'runs' ? series[position].runs.length : typical(differences.find(one => one.key === key)!.values[position]);
  };
  const positions = series.map((_, index) => index);
  const rows = sort ? sorted(positions, sort, valueOf) : positions;
  const sortBy = (key: string) => setSort({ key, descending: sort?.key === key && !sort.descending });
  return (
    <div className="wb-Scroll">
      <table className="wb-Table wb-Plain" aria-label="Where the runs differ">
        <thead>
          <tr>
            {['curve', 'runs', ...differences.map(({ key }) => key)].map(key => (
              <SortHead key={key} name={key} sort={sort} sortBy={sortBy} />
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(index => [series[index], index] as const).map(([one, index]) => (
            <tr key={one.label}>
              <td>
                <span className="wb-Swatch" style={{ background: CYCLE[index % CYCLE.length] }} aria-hidden="true" />
                {one.label}
              </td>
              <td>
                {one.runs.map((run, number) => (
                  <React.Fragment key={run}>
                    {number > 0 && ' '}
                    <button type="button" className="wb-Link" title={`${run}: ${one.statuses[number]}`} onClick={() => props.openRun(run)}>
                      {run.replace(/^.*-/, '')}
                    </button>
                  </React.Fragment>
                ))}
              </td>
              {differences.map(({ key, values }) => (
                <td key={key} data-number={typeof values[index][0] === 'number' || undefined}>
                  {summary(key, values[index])}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function numbersOf(values: Value[]): number[] {
  return values.filter((value): value is number => typeof value === 'number');
}

/** A setting, which all runs of a curve share, or the mean of their results. */
function typical(values: Value[]): Value {
  const numbers = numbersOf(values);
  return numbers.length ? interval(numbers).mean : (values.find(value => value !== null) ?? null);
}

/** The same as text, a mean with its interval. */
function summary(key: string, values: Value[]): string {
  const numbers = numbersOf(values);
  return numbers.length > 1 ? shownInterval(key, interval(numbers)) : shown(key, typical(values));
}
