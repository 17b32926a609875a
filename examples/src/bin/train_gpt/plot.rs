//! The loss curve as a picture and as numbers.

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use plotters::prelude::*;

use crate::progress::Record;

/// Makes the folder, before an hour of training is spent on results that can't be kept.
pub(crate) fn prepare(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder)
        .map_err(|error| format!("could not make the folder {}: {error}", folder.display()))
}

/// Writes `losses.csv` and `loss.svg` to `folder` and returns the path of the picture.
pub(crate) fn save(folder: &Path, title: &str, records: &[Record]) -> Result<PathBuf, String> {
    let picture = folder.join("loss.svg");
    fs::write(folder.join("losses.csv"), csv(records))
        .map_err(|error| error.to_string())
        .and_then(|()| draw(&picture, title, records).map_err(|error| error.to_string()))
        .map_err(|error| format!("could not write to {}: {error}", folder.display()))?;
    Ok(picture)
}

fn csv(records: &[Record]) -> String {
    let mut text = String::from("step,loss,grad_norm,seconds\n");
    for (step, record) in records.iter().enumerate() {
        let seconds = record.elapsed.as_secs_f64();
        let _ = writeln!(
            text,
            "{},{},{},{seconds:.3}",
            step + 1,
            record.loss,
            record.grad_norm
        );
    }
    text
}

fn draw(path: &Path, title: &str, records: &[Record]) -> Result<(), Box<dyn Error>> {
    // A step with a loss that is no number leaves a gap in the numbers, not in the picture.
    let points: Vec<(f64, f64)> = records
        .iter()
        .enumerate()
        .map(|(step, record)| ((step + 1) as f64, record.loss))
        .filter(|(_, loss)| loss.is_finite())
        .collect();
    let top = points.iter().map(|point| point.1).fold(0.0, f64::max);

    let root = SVGBackend::new(path, (800, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..records.len().max(2) as f64, 0.0..(top * 1.05).max(1.0))?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("loss (nats per character)")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .max_light_lines(0)
        .draw()?;
    chart.draw_series(LineSeries::new(points.iter().copied(), BLUE.mix(0.3)))?;
    chart.draw_series(LineSeries::new(smooth(&points), BLUE.stroke_width(2)))?;
    root.present()?;
    Ok(())
}

/// An exponential moving average, started at the first value.
fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut average = points.first().map_or(0.0, |point| point.1);
    points
        .iter()
        .map(|&(step, loss)| {
            average += 0.1 * (loss - average);
            (step, average)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_numbers_are_one_line_per_step() {
        let record = Record {
            loss: 4.25,
            grad_norm: 0.5,
            elapsed: Duration::from_millis(1500),
        };
        assert_eq!(
            csv(&[record]),
            "step,loss,grad_norm,seconds\n1,4.25,0.5,1.500\n"
        );
    }

    #[test]
    fn smoothing_starts_at_the_first_value_and_follows_the_rest() {
        assert_eq!(smooth(&[(1.0, 4.0), (2.0, 3.0)]), [(1.0, 4.0), (2.0, 3.9)]);
        assert!(smooth(&[]).is_empty());
    }
}
