package shm

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// faults is how many page faults this thread has had that read nothing from a disk.
func faults(tb testing.TB) int64 {
	tb.Helper()
	var u unix.Rusage
	require.NoError(tb, unix.Getrusage(unix.RUSAGE_THREAD, &u))
	return u.Minflt
}

// Warm maps what the owner has allocated, follows the owner, allocates nothing itself, and ends with Close.
func TestWarm(t *testing.T) {
	runtime.LockOSThread() // whose faults are counted
	defer runtime.UnlockOSThread()
	const size = 2*warmStep + 5000
	file, err := Reserve("test")
	require.NoError(t, err)
	owner, err := Fit(file, size)
	require.NoError(t, err)
	user, err := MapOnDemand(int(file.Fd()), size)
	require.NoError(t, err)
	taken := func() int64 {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(int(file.Fd()), &st))
		return st.Blocks * 512
	}

	ok, err := populate(user.Bytes()[:warmStep])
	require.NoError(t, err)
	require.False(t, ok)
	require.Zero(t, taken())
	require.NoError(t, Allocate(file, 0, warmStep))
	ok, err = populate(user.Bytes()[:warmStep])
	require.NoError(t, err)
	require.False(t, ok, "no page is zeroed")
	require.NoError(t, owner.Populate(0, warmStep-4096))
	ok, err = populate(user.Bytes()[:warmStep])
	require.NoError(t, err)
	require.False(t, ok, "one page is not zeroed")

	user.Warm()
	require.NoError(t, Allocate(file, 0, size))
	require.NoError(t, owner.Populate(0, size))
	allocated := taken()
	user.warming.Wait()
	require.Equal(t, allocated, taken())
	before := faults(t)
	sum := byte(0)
	for at := 0; at < size; at += 4096 {
		sum |= user.Bytes()[at]
	}
	require.Zero(t, sum)
	require.Less(t, faults(t)-before, int64(size/4096/16), "at most a few: the runtime has some of its own")
	require.NoError(t, user.Close())
	require.NoError(t, owner.Close())
	require.NoError(t, file.Close())
}

// Close does not wait for memory that nobody allocates.
func TestWarmEnds(t *testing.T) {
	r, err := CreateOnDemand("test", 1<<30)
	require.NoError(t, err)
	r.Warm()
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
	r.Warm()
}

// BenchmarkFirstTouch copies a block of the real model into memory that nobody has used yet: as it is, allocated by its owner,
// allocated and warmed, and used before.
func BenchmarkFirstTouch(b *testing.B) {
	const block, blocks = 1474560, 64
	src := make([]byte, block)
	for i := range src {
		src[i] = byte(i)
	}
	for _, c := range []struct {
		name                  string
		allocated, warm, used bool
	}{{name: "neither"}, {"allocated", true, false, false}, {"populated", true, false, false}, {"warmed", true, true, false}, {"used", true, true, true}} {
		b.Run(c.name, func(b *testing.B) {
			var spent time.Duration
			for range b.N {
				file, err := Reserve("bench")
				require.NoError(b, err)
				owner, err := Fit(file, block*blocks)
				require.NoError(b, err)
				if c.allocated {
					require.NoError(b, Allocate(file, 0, block*blocks))
				}
				if c.warm || c.name == "populated" {
					require.NoError(b, owner.Populate(0, block*blocks))
				}
				user, err := MapOnDemand(int(file.Fd()), block*blocks)
				require.NoError(b, err)
				if c.warm {
					user.Warm()
					user.warming.Wait()
				}
				copies := func() {
					for i := range blocks {
						copy(user.Bytes()[i*block:], src)
					}
				}
				if c.used {
					copies()
				}
				began := time.Now()
				copies()
				spent += time.Since(began)
				require.NoError(b, user.Close())
				require.NoError(b, owner.Close())
				require.NoError(b, file.Close())
			}
			b.ReportMetric(float64(spent.Microseconds())/float64(b.N*blocks), "us/block")
			b.ReportMetric(0, "ns/op")
		})
	}
}
