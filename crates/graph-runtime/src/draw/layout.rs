//! Where everything in the picture stands: a column for each level, from left to right.
//!
//! An edge that passes columns has a bend in each, which takes room there as nodes do, so that it crosses no node;
//! all edges of one node share their bends. Sweeps sort each column by where its neighbours stand, and then move
//! everything as near to its neighbours as the order within the column leaves room for.

use std::collections::BTreeMap;

use super::picture::Picture;

/// Where a picture's steps stand, and how its edges go.
pub(super) struct Layout {
    /// By step.
    pub(super) areas: Vec<Area>,
    /// By edge.
    pub(super) routes: Vec<Vec<Point>>,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// A rectangle; `y` is its middle.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
}

/// Something that takes room in a column: a step, or the bend of edges that pass.
struct Item {
    column: usize,
    height: f64,
    y: f64,
    before: Vec<usize>,
    after: Vec<usize>,
}

#[derive(Clone, Copy)]
enum Side {
    Before,
    After,
    Both,
}

impl Layout {
    /// Lays out a picture, whose top is at 0.
    pub(super) fn of(picture: &Picture) -> Self {
        let (mut items, ways) = items(picture);
        let mut columns = columns(&items);
        sort(&mut items, &mut columns);
        for side in [Side::Before, Side::After, Side::Before, Side::After, Side::Both, Side::Both] {
            settle(&mut items, &columns, side);
        }
        let highest = items.iter().map(|item| item.y - item.height / 2.0).fold(f64::INFINITY, f64::min);
        let highest = if highest.is_finite() { highest } else { 0.0 };
        for item in &mut items {
            item.y -= highest;
        }
        let lowest = items.iter().map(|item| item.y + item.height / 2.0).fold(0.0, f64::max);
        let (places, width) = places(picture, columns.len());
        let area = |item: &Item| {
            let (x, column_width) = places[item.column];
            let width = if item.height > JOIN_SIZE { BOX_WIDTH } else { JOIN_SIZE };
            Area { x: x + (column_width - width) / 2.0, y: item.y, width, height: item.height }
        };
        let areas: Vec<Area> = items[..picture.steps.len()].iter().map(area).collect();
        let routes = ways.iter().map(|way| route(way, &items, &areas, &places)).collect();
        Self { areas, routes, width: width + MARGIN, height: lowest + MARGIN }
    }

    /// The same with room above it.
    pub(super) fn below(mut self, top: f64) -> Self {
        self.height += top;
        self.areas.iter_mut().for_each(|area| area.y += top);
        self.routes.iter_mut().flatten().for_each(|point| point.y += top);
        self
    }
}

/// The items, and for each edge those that it passes.
fn items(picture: &Picture) -> (Vec<Item>, Vec<Vec<usize>>) {
    let item = |column, height| Item { column, height, y: 0.0, before: Vec::new(), after: Vec::new() };
    let step_height = |is_node| if is_node { BOX_HEIGHT } else { JOIN_SIZE };
    let mut items: Vec<Item> =
        picture.steps.iter().map(|step| item(step.level, step_height(step.node.is_some()))).collect();
    let mut bends: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut ways = Vec::with_capacity(picture.edges.len());
    for edge in &picture.edges {
        let passed = picture.steps[edge.from].level + 1..picture.steps[edge.to].level;
        let mut way = vec![edge.from];
        for column in passed {
            let bend = *bends.entry((edge.from, column)).or_insert_with(|| {
                items.push(item(column, BEND_HEIGHT));
                items.len() - 1
            });
            way.push(bend);
        }
        way.push(edge.to);
        ways.push(way);
    }
    for pair in ways.iter().flat_map(|way| way.windows(2)) {
        items[pair[0]].after.push(pair[1]);
        items[pair[1]].before.push(pair[0]);
    }
    for item in &mut items {
        for neighbours in [&mut item.before, &mut item.after] {
            neighbours.sort_unstable();
            neighbours.dedup();
        }
    }
    (items, ways)
}

fn columns(items: &[Item]) -> Vec<Vec<usize>> {
    let count = items.iter().map(|item| item.column + 1).max().unwrap_or(0);
    let mut columns = vec![Vec::new(); count];
    for (index, item) in items.iter().enumerate() {
        columns[item.column].push(index);
    }
    columns
}

/// Orders each column by where neighbours stand, there and back again.
fn sort(items: &mut [Item], columns: &mut [Vec<usize>]) {
    const SWEEPS: usize = 6;
    for column in columns.iter() {
        stack(items, column);
    }
    for sweep in 0..SWEEPS {
        let count = columns.len();
        for turn in 0..count {
            let (column, side) =
                if sweep % 2 == 0 { (turn, Side::Before) } else { (count - 1 - turn, Side::After) };
            let mut keyed: Vec<(f64, usize)> =
                columns[column].iter().map(|&index| (wish(items, index, side), index)).collect();
            // Stable, so that what has no reason to move stays.
            keyed.sort_by(|one, other| one.0.total_cmp(&other.0));
            columns[column] = keyed.into_iter().map(|(_, index)| index).collect();
            stack(items, &columns[column]);
        }
    }
}

/// Puts a column's items below each other, around the middle.
fn stack(items: &mut [Item], column: &[usize]) {
    let offsets = offsets(items, column);
    let middle = offsets.last().copied().unwrap_or(0.0) / 2.0;
    for (&index, offset) in column.iter().zip(offsets) {
        items[index].y = offset - middle;
    }
}

/// How far below the first item of a column each one is at least.
fn offsets(items: &[Item], column: &[usize]) -> Vec<f64> {
    let mut offsets = Vec::with_capacity(column.len());
    let mut above: Option<(f64, f64)> = None;
    for &index in column {
        let height = items[index].height;
        let offset = above.map_or(0.0, |(offset, other)| {
            let gap = if height.min(other) < BOX_HEIGHT { BEND_GAP } else { BOX_GAP };
            offset + f64::midpoint(height, other) + gap
        });
        offsets.push(offset);
        above = Some((offset, height));
    }
    offsets
}

/// Where an item's neighbours would have it.
fn wish(items: &[Item], index: usize, side: Side) -> f64 {
    let item = &items[index];
    let (before, after): (&[usize], &[usize]) = match side {
        Side::Before => (&item.before, &[]),
        Side::After => (&[], &item.after),
        Side::Both => (&item.before, &item.after),
    };
    let count = before.len() + after.len();
    if count == 0 {
        return item.y;
    }
    before.iter().chain(after).map(|&other| items[other].y).sum::<f64>() / count as f64
}

/// Moves all items of each column as near as can be to where their neighbours would have them.
fn settle(items: &mut [Item], columns: &[Vec<usize>], side: Side) {
    let backwards = matches!(side, Side::After);
    for turn in 0..columns.len() {
        let column = &columns[if backwards { columns.len() - 1 - turn } else { turn }];
        let offsets = offsets(items, column);
        // Without their distances, items may share a place and must not change order.
        let wishes = column.iter().zip(&offsets).map(|(&index, offset)| {
            let weight = if items[index].height < BOX_HEIGHT { BEND_WEIGHT } else { 1.0 };
            (wish(items, index, side) - offset, weight)
        });
        let settled = isotonic(wishes);
        for ((&index, offset), place) in column.iter().zip(offsets).zip(settled) {
            items[index].y = place + offset;
        }
    }
}

/// The rising sequence that is nearest to weighted values, by pooling neighbours that are out of order.
fn isotonic(values: impl Iterator<Item = (f64, f64)>) -> Vec<f64> {
    // Mean, weight and length of each pool.
    let mut pools: Vec<(f64, f64, usize)> = Vec::new();
    for (value, weight) in values {
        let mut pool = (value, weight, 1);
        while let Some(&(mean, before, length)) = pools.last() {
            if mean <= pool.0 {
                break;
            }
            let sum = before + pool.1;
            pool = ((mean * before + pool.0 * pool.1) / sum, sum, length + pool.2);
            pools.pop();
        }
        pools.push(pool);
    }
    pools.into_iter().flat_map(|(mean, _, length)| std::iter::repeat_n(mean, length)).collect()
}

/// Left edge and width of each column, and the right edge of the last.
fn places(picture: &Picture, columns: usize) -> (Vec<(f64, f64)>, f64) {
    let mut widths = vec![JOIN_SIZE; columns];
    for step in picture.steps.iter().filter(|step| step.node.is_some()) {
        widths[step.level] = BOX_WIDTH;
    }
    let mut x = MARGIN;
    let places: Vec<(f64, f64)> = widths
        .into_iter()
        .map(|width| {
            let place = (x, width);
            x += width + COLUMN_GAP;
            place
        })
        .collect();
    let end = places.last().map_or(MARGIN, |(x, width)| x + width);
    (places, end)
}

/// The points of an edge: each pair of them is one piece, curved between columns and straight across them.
fn route(way: &[usize], items: &[Item], areas: &[Area], places: &[(f64, f64)]) -> Vec<Point> {
    let mut points = Vec::with_capacity(2 * way.len() - 2);
    for (turn, &index) in way.iter().enumerate() {
        let (x, width) =
            areas.get(index).map_or_else(|| places[items[index].column], |area| (area.x, area.width));
        let y = items[index].y;
        if turn > 0 {
            points.push(Point { x, y });
        }
        if turn + 1 < way.len() {
            points.push(Point { x: x + width, y });
        }
    }
    points
}

pub(super) const MARGIN: f64 = 24.0;
pub(super) const BOX_WIDTH: f64 = 158.0;
pub(super) const BOX_HEIGHT: f64 = 42.0;
pub(super) const JOIN_SIZE: f64 = 10.0;
/// Room for the labels of edges.
const COLUMN_GAP: f64 = 144.0;
const BOX_GAP: f64 = 22.0;
const BEND_HEIGHT: f64 = 4.0;
const BEND_GAP: f64 = 12.0;
/// A crooked line is worse than a node beside its neighbours.
const BEND_WEIGHT: f64 = 4.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_rise_and_keep_what_rises_already() {
        let check = |values: &[f64], expected: &[f64]| {
            assert_eq!(isotonic(values.iter().map(|&value| (value, 1.0))), expected);
        };
        check(&[], &[]);
        check(&[1.0, 2.0, 5.0], &[1.0, 2.0, 5.0]);
        check(&[3.0, 1.0], &[2.0, 2.0]);
        check(&[1.0, 5.0, 3.0, 1.0, 9.0], &[1.0, 3.0, 3.0, 3.0, 9.0]);
    }
}
