// Rows that a click on a column's title sorts.

import * as React from 'react';

import { Value } from './api';
import { title } from './values';

export type Sort = { key: string; descending: boolean };

const WORDS = new Intl.Collator('en', { numeric: true });

/** Numbers before words; rows without the value last, in both directions. */
export function sorted<T>(rows: T[], sort: Sort, valueOf: (row: T, key: string) => Value): T[] {
  const sign = sort.descending ? -1 : 1;
  const absent = (value: Value) => value === null || value === undefined || value === '';
  return [...rows].sort((one, other) => {
    const a = valueOf(one, sort.key);
    const b = valueOf(other, sort.key);
    if (absent(a) || absent(b)) {
      return Number(absent(a)) - Number(absent(b));
    }
    if (typeof a === 'number' && typeof b === 'number') {
      return sign * (a - b);
    }
    if (typeof a !== typeof b) {
      return sign * (typeof a === 'number' ? -1 : 1);
    }
    return sign * WORDS.compare(String(a), String(b));
  });
}

/** The title of a column, as a button that sorts by it. */
export function SortHead(props: { name: string; sort: Sort | null; sortBy: (key: string) => void }): JSX.Element {
  const { name, sort } = props;
  const order = sort?.key !== name ? 'none' : sort.descending ? 'descending' : 'ascending';
  return (
    <th scope="col" aria-sort={order}>
      <button type="button" title={`Sort by ${title(name)}`} onClick={() => props.sortBy(name)}>
        {title(name)}
        <span aria-hidden="true">{{ none: '', descending: ' ▾', ascending: ' ▴' }[order]}</span>
      </button>
    </th>
  );
}
