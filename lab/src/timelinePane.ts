// The timeline of a run in the main area. It follows the newest steps while the run trains. The script that draws it is
// the server's: workbench/plots/trace_viewer/viewer.js, which notebooks and HTML pages use too.

import { LabIcon } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import { Widget } from '@lumino/widgets';

import { Api } from './api';

const LIVE_MS = 2000;

interface Viewer {
  show(content: unknown): Promise<void>;
  say(text: string): void;
  dispose(): void;
}

interface Query {
  first?: number;
  last?: number;
  critical?: boolean;
}

let script: Promise<{ mount: (place: HTMLElement, options: object) => Viewer }> | null = null;

/** The module that draws, once for the page. */
function loaded(api: Api): NonNullable<typeof script> {
  script ??= api.text('timeline.js').then(text => {
    const url = URL.createObjectURL(new Blob([text], { type: 'text/javascript' }));
    return import(/* webpackIgnore: true */ url).finally(() => URL.revokeObjectURL(url));
  });
  script.catch(() => (script = null)); // the next pane asks again
  return script;
}

export class TimelinePane extends Widget {
  private viewer: Viewer | null = null;
  private place = document.createElement('div');
  private trouble = document.createElement('div');
  private others = document.createElement('select');
  private query: Query = {};
  private poll: Poll;

  constructor(
    readonly run: string,
    private api: Api,
    icon: LabIcon
  ) {
    super();
    this.addClass('wb-Pane');
    this.addClass('wb-TimelinePane');
    this.title.label = `Timeline of ${run.replace(/^\d{8}-\d{6}-/, '')}`;
    this.title.caption = `Timeline of ${run}`;
    this.title.icon = icon;
    this.title.closable = true;
    this.trouble.className = 'wb-Row-error wb-Trouble';
    this.trouble.setAttribute('role', 'alert');
    this.trouble.hidden = true;
    const label = document.createElement('label');
    label.append('compare with ', this.others);
    label.className = 'wb-TimelinePane-other';
    this.others.add(new Option('no other run', ''));
    this.others.addEventListener('focus', () => void this.list());
    this.others.addEventListener('change', () => this.ask({}));
    this.place.className = 'wb-TimelinePane-place';
    this.node.append(label, this.trouble, this.place);
    this.poll = new Poll({
      auto: true,
      factory: () => this.fetch(),
      frequency: { interval: LIVE_MS, backoff: true, max: 30000 },
      name: `workbench:timeline:${run}`,
      standby: () => !this.isVisible || document.hidden
    });
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.poll.dispose();
      this.viewer?.dispose();
      super.dispose();
    }
  }

  /** Show other steps, or compare with another run. */
  private ask(query: Query): void {
    this.query = query;
    void this.poll.refresh().catch(() => undefined);
  }

  /** Offer the newest runs to compare with. */
  private async list(): Promise<void> {
    const { runs } = await this.api.runs('limit=30');
    const chosen = this.others.value;
    const rows = runs.filter(one => one.run !== this.run);
    this.others.replaceChildren(
      new Option('no other run', ''),
      ...rows.map(one => new Option(`${one.label} (${one.run})`, one.run))
    );
    this.others.value = rows.some(one => one.run === chosen) ? chosen : '';
  }

  /** Read and draw; again if the reader has asked for something else meanwhile, because a poll that runs starts no other. */
  private async fetch(): Promise<void> {
    let query: Query;
    do {
      query = this.query;
      await this.draw();
    } while (query !== this.query && !this.isDisposed);
  }

  private async draw(): Promise<void> {
    try {
      const { first, last, critical } = this.query;
      const asked = Object.entries({ first, last, critical: critical ? 1 : undefined, other: this.others.value || undefined })
        .filter(([, value]) => value !== undefined)
        .map(([name, value]) => `${name}=${encodeURIComponent(String(value))}`);
      const content = await this.api.timeline(this.run, asked.join('&'));
      const { mount } = await loaded(this.api);
      if (this.isDisposed) {
        return;
      }
      this.viewer ??= mount(this.place, {
        load: (change: Query) =>
          this.ask(change.critical ? { ...this.query, ...change } : { critical: this.query.critical, ...change })
      });
      await this.viewer.show(content);
      this.trouble.hidden = true;
      const interval = content.live ? LIVE_MS : Poll.NEVER;
      if (interval !== this.poll.frequency.interval) {
        this.poll.frequency = { interval, backoff: true, max: Math.max(interval, 30000) };
      }
    } catch (error) {
      this.trouble.textContent = (error as Error).message;
      this.trouble.hidden = false;
      throw error; // the poll backs off
    }
  }
}
