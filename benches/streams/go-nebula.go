// One TCP stream between two programs through the service package of Go Nebula: the peer of `measure listen` and
// `measure dial` in nebula-net's examples.
//
//	stream listen CONFIG
//	stream dial CONFIG ADDRESS SECONDS
package main

import (
	"fmt"
	"io"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/slackhq/nebula"
	"github.com/slackhq/nebula/config"
	"github.com/slackhq/nebula/logging"
	"github.com/slackhq/nebula/overlay"
	"github.com/slackhq/nebula/service"
)

const port = "7"

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(arguments []string) error {
	if len(arguments) < 2 {
		return fmt.Errorf("usage: stream listen CONFIG | stream dial CONFIG ADDRESS SECONDS")
	}
	text, err := os.ReadFile(arguments[1])
	if err != nil {
		return err
	}
	settings := config.NewC(logging.NewLogger(os.Stderr))
	if err := settings.LoadString(string(text)); err != nil {
		return err
	}
	control, err := nebula.Main(settings, false, "stream", logging.NewLogger(os.Stderr), overlay.NewUserDeviceFromConfig)
	if err != nil {
		return err
	}
	node, err := service.New(control)
	if err != nil {
		return err
	}
	if arguments[0] == "listen" {
		return listen(node)
	}
	return dial(node, arguments[2], arguments[3])
}

// Reads one stream to its end and answers with the number of bytes.
func listen(node *service.Service) error {
	listener, err := node.Listen("tcp", ":"+port)
	if err != nil {
		return err
	}
	fmt.Println("listening")
	stream, err := listener.Accept()
	if err != nil {
		return err
	}
	total, buffer := int64(0), make([]byte, 1<<18)
	for {
		count, err := stream.Read(buffer)
		total += int64(count)
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(stream, "%d", total); err != nil {
		return err
	}
	stream.Close()
	// What was written is delivered by then.
	time.Sleep(500 * time.Millisecond)
	return nil
}

// Writes for some seconds, and prints how fast the peer received it.
func dial(node *service.Service, address, seconds string) error {
	duration, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		return err
	}
	stream, err := node.Dial("tcp", address+":"+port)
	if err != nil {
		return err
	}
	started, data := time.Now(), make([]byte, 1<<18)
	for time.Since(started).Seconds() < duration {
		if _, err := stream.Write(data); err != nil {
			return err
		}
	}
	if err := stream.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return err
	}
	answer, err := io.ReadAll(stream)
	if err != nil {
		return err
	}
	took := time.Since(started).Seconds()
	total, err := strconv.ParseInt(string(answer), 10, 64)
	if err != nil {
		return err
	}
	fmt.Printf("%d bytes in %.3f s\n", total, took)
	return nil
}
