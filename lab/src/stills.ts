// The header that a saved notebook keeps of a run in training. A kernel that has ended, or a page that was loaded again,
// cannot bring it up to date; so the page asks the server.

import { Poll } from '@lumino/polling';

import { Api, isLive, OFFLINE, OneRun } from './api';
import { digits, duration, percent, progress } from './format';
import { MAX_MS } from './model';

const INTERVAL_MS = 2000;
const LINES = '.workbench-still [data-run]'; // of workbench/plots/live/header.py; hidden next to a live view

/** Bring the headers in view up to date, until their runs have ended. */
export function updateStills(api: Api): void {
  new Poll({
    factory: () => update(api),
    frequency: { interval: INTERVAL_MS, backoff: true, max: MAX_MS },
    name: 'workbench:stills',
    standby: 'when-hidden'
  });
}

async function update(api: Api): Promise<void> {
  const lines = [...document.querySelectorAll<HTMLElement>(LINES)].filter(line => line.offsetParent && !line.dataset.ended);
  for (const name of new Set(lines.map(line => line.dataset.run!))) {
    const found = await api.run(name).catch((error: Error) => {
      if (error.message === OFFLINE) {
        throw error; // the poll backs off
      }
      return null; // it was removed: the notebook has all that is left of it
    });
    for (const line of lines.filter(one => one.dataset.run === name)) {
      if (found) {
        show(line, found);
      }
      if (!found || !isLive(found.run)) {
        line.dataset.ended = 'true';
      }
    }
  }
}

function element(name: string, content: string, className = '', state = ''): HTMLElement {
  const made = document.createElement(name);
  made.textContent = content;
  made.className = className;
  made.dataset.state = state;
  return made;
}

function show(line: HTMLElement, found: OneRun): void {
  const { run } = found;
  const state = run.status;
  const loss = typeof run.train_loss === 'number' ? `loss ${digits(run.train_loss)}` : '';
  const facts = [
    run.label,
    progress(run),
    run.left_s !== null && state === 'running' ? `${duration(run.left_s)} left` : '',
    typeof run.accuracy === 'number' ? `accuracy ${percent(run.accuracy)}` : loss
  ].filter(Boolean);
  line.replaceChildren(
    element('span', '', 'wb-Dot', state),
    ' ',
    element('b', state, 'wb-State', state),
    ` \u00a0${facts.join(' \u00a0·\u00a0 ')} \u00a0·\u00a0 `,
    element('code', run.folder)
  );
  if (run.error && ['failed', 'killed', 'lost'].includes(state)) {
    line.append(element('div', run.error.split('\n')[0], 'wb-State', state));
  }
}
