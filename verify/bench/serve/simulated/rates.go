package simulated

import "time"

// point is a measured time for a number of tokens, or of sequences.
type point struct {
	size int
	ms   float64
}

// curve is what was measured, by ascending size.
type curve []point

// at is the time for a size: between two points a line, before the first its time, and beyond the last the line goes on.
func (c curve) at(size int) time.Duration {
	ms := c[0].ms
	for i := 1; i < len(c) && size > c[i-1].size; i++ {
		a, b := c[i-1], c[i]
		ms = a.ms + (b.ms-a.ms)*float64(size-a.size)/float64(b.size-a.size)
		if size <= b.size {
			break
		}
	}
	return time.Duration(ms * float64(time.Millisecond))
}

// rising is the curve with the points that lie above a later one lowered to it: what is smaller does not take longer.
func (c curve) rising() curve {
	out := append(curve(nil), c...)
	for i := len(out) - 2; i >= 0; i-- {
		out[i].ms = min(out[i].ms, out[i+1].ms)
	}
	return out
}

// rates are what one engine can do.
type rates struct {
	prompt curve // time of a step by tokens of prompts that are computed in it; it rises
	decode curve // by sequences that get a token
	room   int   // tokens that its cache holds
	flat   bool  // short prompts take what was measured
}

// mixed is by how much longer a step takes that computes prompts and generates as well. SplitwiseSim supposes this; it was not measured.
const mixed = 1.1

// short is how many tokens of prompts a step must have to be as long as measured. Prompts of 128 and of 256 tokens took nearly as long as those of 512, 20 ms
// longer than a step that only generates: overhead of the engine that was measured. A chunk of a few tokens beside answers is supposed to have none.
const short = 512

// step is how long a step takes that computes tokens of prompts, and generates one token for each of its answers. With fewer than 512 tokens of prompts it
// is on a line from a step that computes none.
func (r *rates) step(tokens, answers int) time.Duration {
	if tokens == 0 {
		return r.decode.at(answers)
	}
	if tokens >= short || r.flat {
		return r.prompts(tokens, answers)
	}
	from := r.decode.at(max(1, answers))
	return from + (r.prompts(short, answers)-from)*time.Duration(tokens)/short
}

// prompts is how long a step takes with tokens of prompts, as they were measured.
func (r *rates) prompts(tokens, answers int) time.Duration {
	if answers == 0 {
		return r.prompt.at(tokens)
	}
	return max(time.Duration(mixed*float64(r.prompt.at(tokens+answers))), r.decode.at(answers))
}

// The rates of Llama 2 70B (fp16) on GPUs of a DGX H100: medians of what the authors of Splitwise (Patel et al., ISCA 2024) measured and published
// with their simulator, https://github.com/Mutinifni/splitwise-sim, file data/perf_model.csv at 378088013a54, hardware h100-80gb. They are column
// prompt_time of batch_size 1, and column token_time of prompt_size 512, both for token_size 128 and tensor_parallel 4 and 8, rounded to a tenth of a
// millisecond. Beyond 64 answers nothing was measured: the line from 32 to 64 goes on.
func fourGPUs() *rates {
	return &rates{
		prompt: curve{{128, 49.1}, {256, 51.0}, {512, 59.6}, {1024, 105.6}, {2048, 200.7}, {4096, 463.5}, {8192, 953.6}}.rising(),
		decode: curve{{1, 29.7}, {2, 30.0}, {4, 29.9}, {8, 31.4}, {16, 32.8}, {32, 36.9}, {64, 52.4}}.rising(),
		room:   roomOn(4),
	}
}

func eightGPUs() *rates {
	return &rates{
		prompt: curve{{128, 58.2}, {256, 51.7}, {512, 53.4}, {1024, 77.9}, {2048, 136.8}, {4096, 390.3}, {8192, 844.9}}.rising(),
		decode: curve{{1, 29.8}, {2, 30.3}, {4, 31.8}, {8, 32.5}, {16, 34.2}, {32, 38.6}, {64, 50.2}}.rising(),
		room:   roomOn(8),
	}
}

// What a token takes in the cache: keys and values of 80 layers, 8 heads of 128 numbers each, 2 bytes a number.
const tokenBytes = 80 * 2 * 8 * 128 * 2

// roomOn is how many tokens the caches of some GPUs hold: nine tenths of their 80 GB less 69 billion weights of 2 bytes.
func roomOn(gpus int) int { return (gpus*72e9 - 138e9) / tokenBytes }

// What a handover takes: all layers' keys and values of a token over the 400 Gbit/s that a DGX H100 has for each GPU. The transfer begins when the prompt
// is computed, layer-wise saves would hide most of it.
const (
	linkBytes    = 400e9 / 8 // a second
	transferTime = 2 * time.Millisecond
)

// transfer is how long tokens take from one engine to another.
func transfer(tokens int) time.Duration {
	return transferTime + time.Duration(float64(tokens)*tokenBytes/linkBytes*float64(time.Second))
}
