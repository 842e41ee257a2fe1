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

// rates are the times of one engine's steps.
type rates struct {
	prompt curve // by tokens of prompts that are computed in the step
	decode curve // by sequences that get a token
}

// mixed is by how much longer a step takes that computes prompts and generates as well. SplitwiseSim supposes this; it was not measured.
const mixed = 1.1

// step is how long a step takes that computes tokens of prompts, and generates one token for each of its answers.
func (r *rates) step(tokens, answers int) time.Duration {
	switch {
	case tokens == 0:
		return r.decode.at(answers)
	case answers == 0:
		return r.prompt.at(tokens)
	}
	return max(time.Duration(mixed*float64(r.prompt.at(tokens+answers))), r.decode.at(answers))
}

// The rates of Llama 2 70B (fp16) on GPUs of a DGX H100: medians of what the authors of Splitwise (Patel et al., ISCA 2024) measured and published
// with their simulator, https://github.com/Mutinifni/splitwise-sim, file data/perf_model.csv at 378088013a54. Columns prompt_time of batch_size 1, and
// token_time of prompt_size 512, both for token_size 128 and tensor_parallel 4 and 8.
func fourGPUs() *rates {
	return &rates{
		prompt: curve{{128, 48.4}, {256, 50.9}, {512, 59.6}, {1024, 105.6}, {2048, 200.6}, {4096, 463.4}, {8192, 953.5}},
		decode: curve{{1, 29.6}, {2, 29.9}, {4, 29.9}, {8, 31.4}, {16, 32.8}, {32, 36.8}, {64, 52.3}},
	}
}

func eightGPUs() *rates {
	return &rates{
		prompt: curve{{128, 58.1}, {256, 51.6}, {512, 53.3}, {1024, 77.9}, {2048, 136.7}, {4096, 390.2}, {8192, 844.8}},
		decode: curve{{1, 29.7}, {2, 30.2}, {4, 31.7}, {8, 32.5}, {16, 34.1}, {32, 38.7}, {64, 50.1}},
	}
}

// most is how many sequences an engine runs at once: as many as were measured.
const most = 64

// What a handover takes: all layers' keys and values of a token (80 layers, 8 heads of 128 numbers, 2 bytes each) over the 400 Gbit/s that a DGX H100
// has for each GPU. The transfer begins when the prompt is computed, layer-wise saves would hide most of it.
const (
	tokenBytes  = 2 * 80 * 8 * 128 * 2
	linkBytes   = 50e9 // a second
	handoverLag = 2 * time.Millisecond
)

// transfer is how long it takes to hand over tokens.
func transfer(tokens int) time.Duration {
	return handoverLag + time.Duration(float64(tokens)*tokenBytes/linkBytes*float64(time.Second))
}
