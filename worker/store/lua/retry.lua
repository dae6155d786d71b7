-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still
-- holds it. RQ's own way writes the status before the rest: a kill in between loses the job.
-- when: as put_back takes it. counter: the field that counts tries, and `tries` its new value. ttl: seconds for
-- which results are kept, '' as long as they were. at_front: '1' where it goes to the front then, also later.
-- result: of the entry in rq:results, if there is one.
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local when, counter, tries, ttl, at_front = unpack(ARGV, 8, 12)
local result = {unpack(ARGV, 13)}
local reply = not_held()
if reply then return reply end

write_run(counter, tries)
if at_front == '1' then call('HSET', job, 'enqueue_at_front_on_retry', 1) end
if #result > 0 then
  add_result(result)
  expire_results(ttl)
end
put_back(when)
leave_slot(when)
count('failed_job_count')
let_go(queue, id, eid, worker)
return 'done'
