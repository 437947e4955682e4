// The ranks of a run or a cluster: what each one does and uses, and which one delays the others.

import { LabIcon } from '@jupyterlab/ui-components';
import * as React from 'react';

import { Api, Rank, Ranks } from './api';
import { bytes, count, duration, percent, plural } from './format';
import { Dot } from './panel';
import { PollingPane } from './pollingPane';

const LIVE_MS = 1000;
const IDLE_MS = 5000;
const DOTS: Record<string, string> = { training: 'running', idle: 'ready', stopped: 'paused', silent: 'lost', gone: 'lost' };

export class RanksPane extends PollingPane<Ranks> {
  constructor(
    readonly kind: 'runs' | 'clusters',
    readonly name: string,
    private api: Api,
    icon: LabIcon
  ) {
    super(`Ranks of ${name.replace(/^\d{8}-\d{6}-/, '')}`, icon, LIVE_MS);
    this.title.caption = `Ranks of ${name}`;
  }

  protected read(): Promise<Ranks> {
    return this.api.ranks(this.kind, this.name);
  }

  protected received(data: Ranks): void {
    super.received(data);
    this.setInterval(data.ranks.some(rank => rank.state !== 'ended') ? LIVE_MS : IDLE_MS);
  }

  protected draw(data: Ranks): JSX.Element {
    return <View name={this.name} data={data} />;
  }
}

interface Column {
  title: string;
  hint?: string;
  show: (rank: Rank) => React.ReactNode;
  number?: boolean;
}

function optional(value: number | null, show: (value: number) => string): string {
  return value === null ? '' : show(value);
}

const COLUMNS: Column[] = [
  { title: 'rank', show: rank => rank.rank, number: true },
  {
    title: 'state',
    show: rank => (
      <>
        <Dot state={DOTS[rank.state] ?? 'ended'} />
        <span className="wb-State" data-state={DOTS[rank.state]}>
          {rank.state}
        </span>
        {rank.straggler && (
          <span className="wb-Tag" title={rank.straggler}>
            straggler
          </span>
        )}
      </>
    )
  },
  { title: 'step', show: rank => optional(rank.step, count), number: true },
  {
    title: 'GPU',
    hint: 'share of the time in which a kernel of any process ran on its GPU',
    show: rank => optional(rank.gpu?.share ?? null, percent),
    number: true
  },
  {
    title: 'GPU memory',
    hint: 'used by all processes, of its GPU',
    show: rank => rank.gpu && `${bytes(rank.gpu.used_bytes)} of ${bytes(rank.gpu.total_bytes)}`,
    number: true
  },
  {
    title: 'heartbeat',
    hint: 'age of its last heartbeat; one is written each second',
    show: rank => optional(rank.beat_s, value => `${duration(value)} ago`),
    number: true
  },
  {
    title: 'CPU',
    hint: 'processor time of its process per second; 100 % is one core',
    show: rank => optional(rank.cpu_cores, value => `${Math.round(100 * value)} %`),
    number: true
  },
  { title: 'memory', hint: 'resident memory', show: rank => optional(rank.memory_bytes, bytes), number: true },
  {
    title: 'sends',
    hint: 'bytes that the training sends per second',
    show: rank => optional(rank.sent_bytes_per_s, value => `${bytes(Math.round(value))}/s`),
    number: true
  },
  { title: 'does', hint: 'at its last heartbeat; steps count from 0', show: rank => rank.does },
  { title: 'device', show: rank => rank.gpu?.name ?? rank.device },
  { title: 'host', show: rank => rank.host },
  { title: 'process', show: rank => rank.pid, number: true }
];

function View(props: { name: string; data: Ranks }): JSX.Element {
  const { ranks, run, status } = props.data;
  if (!ranks.length) {
    return <div className="wb-Empty">The ranks have not started yet.</div>;
  }
  const columns = COLUMNS.filter(column => ranks.some(rank => ![null, undefined, ''].includes(column.show(rank) as any)));
  const slow = ranks.filter(rank => rank.straggler);
  return (
    <div className="wb-Ranks">
      <p className="wb-Quiet" role="status">
        {plural(ranks.length, 'rank')}
        {run && `, ${run === props.name ? '' : `training ${run}: `}${status}`}
      </p>
      <table className="wb-Table wb-Plain" aria-label={`Ranks of ${props.name}`}>
        <thead>
          <tr>
            {columns.map(column => (
              <th key={column.title} scope="col" title={column.hint} data-number={column.number || undefined}>
                {column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {ranks.map(rank => (
            <tr key={rank.rank} data-rank={rank.rank} data-straggler={rank.straggler ? true : undefined}>
              {columns.map(column => (
                <td key={column.title} data-number={column.number || undefined}>
                  {column.show(rank)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {slow.map(rank => (
        <p key={rank.rank} className="wb-Quiet">
          Rank {rank.rank} is a straggler: {rank.straggler}.
        </p>
      ))}
      {ranks.some(rank => rank.state === 'silent') && (
        <p className="wb-Quiet">A silent rank has written no heartbeat for 5 s: it does not run, or its host cannot be reached.</p>
      )}
    </div>
  );
}
